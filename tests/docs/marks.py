"""Marks of code blocks: comments that select their test."""

import re
from dataclasses import dataclass

_MARK = re.compile(
    r"(?P<word>run|settings|parse|gpu|cloud)"
    r"(?: with (?P<arguments>.+)| under (?P<path>\S+)|, (?P<reason>.+))?\Z",
    re.DOTALL,
)


class BlockError(AssertionError):
    """A code block is wrong, or has no known test."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Test of a code block.

    Attributes:
        word: `run`, `settings`, `parse`, `gpu`, `cloud`, or empty for the rule of its language.
        detail: arguments for each command (run), place of the settings (settings), or reason (others).
    """

    word: str = ""
    detail: str = ""

    @property
    def is_not_run(self) -> bool:
        """Return whether it may contain unknown words, because it cannot run here."""
        return self.word in {"parse", "gpu", "cloud"}


def parse_mark(text: str) -> Mark:
    """Parse a mark.

    Raises:
        BlockError: it is no mark, or its details are missing or do not match.
    """
    if not text:
        return Mark()
    found = _MARK.match(text)
    if found is None:
        raise BlockError(f"`test: {text}` is no mark: use run, settings under PATH, parse, gpu or cloud")
    given = {name for name in ("arguments", "path", "reason") if found[name]}
    allowed = {"run": {"arguments"}, "settings": {"path"}}.get(found["word"], {"reason"})
    needed = {"settings": {"path"}, "parse": {"reason"}}.get(found["word"], set())
    if not needed <= given <= allowed:
        raise BlockError(
            f"`test: {text}` is no mark: write `run`, `run with ARGUMENTS`, `settings under PATH`, "
            "`parse, REASON`, `gpu` or `cloud`"
        )
    return Mark(found["word"], next((found[name] for name in given), ""))
