"""The UTF-8 of a body's texts: made at most once, for the size of a prompt and for hashes of its beginning.

ASCII is not made here. Its size is known without, and to copy it costs next to nothing; other characters
cost about as much to encode as they did to decode.
"""

import numpy as np

# A character of JSON in ASCII alone, such as \u00e9; one beyond the first 65,536 takes two.
_ESCAPED_BYTES = 6
# Bytes of UTF-8: those of other characters, and the first of each of these.
_NON_ASCII, _FIRST = 0x80, 0xC0


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

    def escape_bytes(self) -> int:
        """By how much these texts are longer in JSON of ASCII alone, at least."""
        longer = 0
        for made in self._made.values():
            data = np.frombuffer(made, np.uint8)
            longer += _ESCAPED_BYTES * int(np.count_nonzero(data >= _FIRST))
            longer -= int(np.count_nonzero(data >= _NON_ASCII))
        return longer

    def known(self, text: str) -> str | bytes:
        """A text in UTF-8 where that was made before, or else as it is."""
        return self._made.get(id(text), text)
