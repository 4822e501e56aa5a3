"""Marks of code blocks: comments that select their test."""

import re
from dataclasses import dataclass

# What may follow each word; the group is the detail.
_FORMS = {
    "run": r"(?: with (.+))?",
    "settings": r" under (\S+)",
    "parse": r", (.+)",
    "gpu": r"(?:, (.+))?",
    "cloud": r"(?:, (.+))?",
}


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
    for word, form in _FORMS.items():
        if found := re.fullmatch(word + form, text, re.DOTALL):
            return Mark(word, found[1] or "")
    raise BlockError(
        f"`test: {text}` is no mark: write `run`, `run with ARGUMENTS`, `settings under PATH`, "
        "`parse, REASON`, `gpu` or `cloud`"
    )
