"""One thing that is wrong with a running application."""

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """How much it matters: who suffers now."""

    DOWN = 0
    """Requests are not answered."""
    DEGRADED = 1
    """Requests are answered late, or some are not."""
    RISK = 2
    """Nobody suffers yet, or somebody did."""
    NOTE = 3
    """Something is not as usual."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong, and what to do next, one sentence each."""

    severity: Severity
    what: str
    next_step: str
