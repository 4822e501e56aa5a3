"""The UTF-8 of a body's texts: made at most once, for the size of a prompt and for hashes of its beginning.

ASCII is not made here. Its size is known without, and to copy it costs next to nothing; other characters
cost about as much to encode as they did to decode.
"""


class Utf8:
    """The UTF-8 of those texts of one body that were asked for. The body must outlive it."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        # By identity: it is told without looking at the text, and all texts live as long as their body.
        self._made: dict[int, bytes] = {}

    def of(self, text: str) -> bytes:
        """A text in UTF-8."""
        if text.isascii():
            return text.encode()
        made = self._made.get(id(text))
        if made is None:
            made = self._made[id(text)] = text.encode()
        return made

    def known(self, text: str) -> str | bytes:
        """A text in UTF-8 where that was made before, or else as it is."""
        return self._made.get(id(text), text)
