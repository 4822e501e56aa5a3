"""How a gateway looks into the schedulers, for those who may."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

View = Callable[[], Awaitable[Mapping[str, Any]]]

# A person is waiting, and a scheduler that takes longer has other troubles.
VIEW_TIMEOUT_S = 5.0


async def _nothing() -> Mapping[str, Any]:
    return {}


async def _unknown(_request_id: str) -> Mapping[str, Any]:
    return {}


async def _unrecorded(_request_id: str) -> str:
    return ""


async def _none() -> Sequence[Mapping[str, Any]]:
    return ()


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
        overview: all that the page shows of it, see `dashboard`.
        receipt: where the time of a request went, by its id; empty where the scheduler does not know it.
        costs: what the requests of each tenant cost.
        recording: the minutes around a request, by its id, for a replay; empty where it is not known.
        capture: the requests that completed lately, without their text.
    """

    queue: View
    status: View
    freeze: Callable[[str], Awaitable[None]]
    usage: View = _nothing
    mode: View = _nothing
    scaling: View = _nothing
    change_mode: Callable[[float], Awaitable[None]] = _unchanged
    overview: View = _nothing
    costs: View = _nothing
    receipt: Callable[[str], Awaitable[Mapping[str, Any]]] = _unknown
    recording: Callable[[str], Awaitable[str]] = _unrecorded
    capture: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]] = _none


Question = Callable[[str, SchedulerViews], Awaitable[Mapping[str, Any]]]
"""What is asked of a model's scheduler, given the model's name."""


async def ask_each(
    views: Mapping[str, SchedulerViews],
    question: Question,
) -> list[Mapping[str, Any]]:
    """Ask every model's scheduler; for one that does not answer, its model and why."""
    answers: list[Mapping[str, Any]] = []
    for model, each in views.items():
        try:
            answers.append(await asyncio.wait_for(question(model, each), VIEW_TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            answers.append({"model": model, "error": f"its scheduler does not answer: {error!r}"})
    return answers
