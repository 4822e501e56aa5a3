"""One thing that is wrong with a configuration."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mistake:
    """One sentence, and where it belongs.

    Attributes:
        line: in the file, from 1; None when no line is at fault.
    """

    message: str
    line: int | None = None

    def located(self, path: Path) -> str:
        """As compilers write it, so that editors and terminals can jump to the line."""
        place = f"{path}:{self.line}" if self.line is not None else str(path)
        return f"{place}: {self.message}"
