"""Which deaths are played."""

from enum import StrEnum
from typing import Annotated, Any

from serve_app.settings_base import POSITIVE, at_least, settings


class DeathSignal(StrEnum):
    """What a process gets: SIGKILL ends it, SIGSTOP halts it with its connections open."""

    KILL = "KILL"
    STOP = "STOP"


@settings
class DeathsCase:
    """Deaths of one kind.

    Attributes:
        kind: of process, one of `run.PROCESSES`, or of node, one of `nodes.KINDS`.
        times: how many deaths.
    """

    kind: str
    signal: DeathSignal
    times: Annotated[int, at_least(1)]

    @property
    def key(self) -> dict[str, Any]:
        """Of its row."""
        return {"kind": self.kind, "signal": self.signal.value}


@settings
class DeathsSettings:
    """What is played.

    Attributes:
        cases: each with an application of its own.
        pause_s: mean time from a whole application to the next death.
        longest_s: a case ends after so long with fewer deaths.
        headless_s: from the death of a head until another is started.
    """

    cases: tuple[DeathsCase, ...]
    rate_per_s: Annotated[float, POSITIVE]
    pause_s: Annotated[float, POSITIVE]
    longest_s: Annotated[float, POSITIVE]
    headless_s: Annotated[float, POSITIVE]
