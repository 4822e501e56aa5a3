"""How a gateway looks into the schedulers, for those who may."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

View = Callable[[], Awaitable[Mapping[str, Any]]]


async def _nothing() -> Mapping[str, Any]:
    return {}


async def _unchanged(_active_share: float) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerViews:
    """How to look into one model's scheduler.

    Attributes:
        queue: who waits where, and why.
        status: replicas, learned queues, what the tuner does.
        freeze: stops its tuner, for the reason given; lets it go on where there is none.
        usage: what was used with each API key.
        mode: how much of the traffic is scheduled.
        scaling: how many replicas each pool should have, and why.
        change_mode: schedules another share of it.
    """

    queue: View
    status: View
    freeze: Callable[[str], Awaitable[None]]
    usage: View = _nothing
    mode: View = _nothing
    scaling: View = _nothing
    change_mode: Callable[[float], Awaitable[None]] = _unchanged
