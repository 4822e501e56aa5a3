"""Settings of deaths, and the audit of requests while parts of an application die."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any

from experiments.common.audit import SteadyTraffic, ends_of
from serve_app.core.settings_base import POSITIVE, at_least, settings


class DeathSignal(StrEnum):
    """Signal to a process: SIGKILL ends it, SIGSTOP halts it with its connections open."""

    KILL = "KILL"
    STOP = "STOP"


@settings
class DeathsCase:
    """Deaths of one kind.

    Attributes:
        kind: of process, one of `run.PROCESSES`, or of node, one of `nodes.KINDS`.
        times: number of deaths.
        resume_streams: setting of the model.
    """

    kind: str
    signal: DeathSignal
    times: Annotated[int, at_least(1)]
    resume_streams: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """Return the key of its row."""
        key: dict[str, Any] = {"kind": self.kind, "signal": self.signal.value}
        return key | ({"resume_streams": True} if self.resume_streams else {})


@settings
class DeathsSettings:
    """Settings of the experiment.

    Attributes:
        cases: each with its own application.
        pause_s: mean time from a complete application to the next death.
        longest_s: time limit of a case, even with fewer deaths.
        headless_s: time from the death of a head until another is started.
    """

    cases: tuple[DeathsCase, ...]
    rate_per_s: Annotated[float, POSITIVE]
    pause_s: Annotated[float, POSITIVE]
    longest_s: Annotated[float, POSITIVE]
    headless_s: Annotated[float, POSITIVE]


TIMEOUT_S = 60.0
LENGTHS = 180
"""Number of different lengths of answers."""
# Log lines follow their answers a little later.
LOG_DELAY_S = 2.0


def figures_of(traffic: SteadyTraffic, back_s: Sequence[float | None], log: Iterable[str]) -> dict[str, Any]:
    """Return the ends of requests and the times until killed processes were replaced.

    Args:
        back_s: time from each death until the application was complete; None if it took too long.
        log: log lines of all gateways.
    """
    return {
        **ends_of(traffic.ended, log, f"{traffic.label}-"),
        "deaths": len(back_s),
        "back_s": list(back_s),
        "slowest_s": max(one.ended_s - one.started_s for one in traffic.ended),
    }
