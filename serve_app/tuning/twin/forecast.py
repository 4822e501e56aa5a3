"""The forecast of another mode: the last requests, all scheduled and all passed by, in the twin.

While only a part of the traffic is scheduled, or none, nobody can see what it would be like if all were. The
twin plays the same requests at the same times both ways, on engines fitted to the real ones. What it says of
the way that is in force can be held against what was measured.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_app.metrics.summary import first_token_figures
from serve_app.tuning.twin.digital_twin import DigitalTwin, TwinPlan
from serve_app.tuning.twin.rests import resting
from serve_app.workloads.trace import Trace

_LEAST_REQUESTS = 200
_MOST_REQUESTS = 2_000
"""Simulated for each of the two ways: a second or two of a core."""
_EVERY_S = 60.0

Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastTask:
    """What to play: `arrivals`, on the engines and with the scheduler of `plan`."""

    plan: TwinPlan
    arrivals: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastResult:
    """Times to first token, both ways (`metrics.first_tokens`).

    Attributes:
        scheduled, passed: of the same requests.
        requests: that were played each way, those of the warm-up included.
    """

    scheduled: Figures
    passed: Figures
    requests: int


def forecast(task: ForecastTask, rest: Callable[[], object] = lambda: None) -> ForecastResult:
    """Play the requests both ways, in this thread.

    Args:
        rest: called now and then; a driver that may use only a share of a core waits there.
    """
    on_event = resting(rest)
    found = []
    for share in (1.0, 0.0):
        tunable = task.plan.tunable
        scheduler = replace(tunable.scheduler, active_share=share)
        twin = DigitalTwin(replace(task.plan, tunable=replace(tunable, scheduler=scheduler)))
        records = twin.serve(task.plan.space.current, task.arrivals, on_event)
        measured = records[round(task.plan.settings.warm_up_ratio * len(records)) :]
        found.append(
            first_token_figures(
                (record.prompt_tokens, record.ttft_s) for record in measured if record.ttft_s is not None
            )
        )
    return ForecastResult(scheduled=found[0], passed=found[1], requests=len(task.arrivals.requests))


class Forecasts:
    """Says when a forecast is due, and keeps the last one. A machine without a clock."""

    def __init__(self) -> None:
        self._result: ForecastResult | None = None
        self._made_at = -math.inf
        self._next_at = -math.inf
        self._is_busy = False
        self._note = ""

    def __repr__(self) -> str:
        return f"<Forecasts {self._result and self._result.requests} requests>"

    def due(
        self,
        active_share: float,
        obstacle: str,
        plan_of: Callable[[], TwinPlan | None],
        now: float,
    ) -> ForecastTask | None:
        """A forecast to make now; its result or failure has to follow before there is another.

        Args:
            active_share: of the requests, which are scheduled; there is no forecast while that is all.
            obstacle: why the twin is not to be trusted; empty when it is.
            plan_of: makes the twin of recent traffic, None where there is none yet.
        """
        if active_share == 1:
            self._result, self._note = None, ""
            return None
        if self._is_busy or now < self._next_at:
            return None
        self._note = obstacle
        plan = None if obstacle else plan_of()
        requests = () if plan is None else plan.traffic.requests
        if plan is None or len(requests) < _LEAST_REQUESTS:
            self._note = obstacle or f"it forecasts after {_LEAST_REQUESTS} requests ({len(requests)} so far)"
            return None
        self._is_busy, self._next_at = True, now + _EVERY_S
        arrivals = replace(plan.traffic, requests=requests[-_MOST_REQUESTS:])
        return ForecastTask(plan=plan, arrivals=arrivals)

    def on_result(self, result: ForecastResult | None, now: float) -> None:
        """Take in a forecast; None when it failed."""
        self._is_busy = False
        if result is not None:
            self._result, self._made_at = result, now

    def document(self, now: float) -> dict[str, Any] | None:
        """The last forecast, for people; None while there is nothing to say."""
        if self._result is None:
            return {"note": self._note} if self._note else None
        return {
            "scheduled": self._result.scheduled,
            "passed": self._result.passed,
            "requests": self._result.requests,
            "age_s": max(0.0, now - self._made_at),
            "note": self._note,
        }
