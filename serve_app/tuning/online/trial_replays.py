"""The replays that trials wait for, one at a time: what the twin expects of their slices.

First the slices before a trial are replayed, and the control variate is fitted to them. Then come the pairs
of the trial, as their slices are judged. A trial goes on without an expectation that is missing or late.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from serve_app.routing.replica import ReplicaSpec
from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.online.control_variate import ControlVariate, control_of
from serve_app.tuning.online.replay import LEAD_SLICES, MAX_REQUESTS, ReplayResult, ReplayTask
from serve_app.tuning.online.rollout import Rollout
from serve_app.tuning.online.rollout_settings import Apply, RolloutSettings
from serve_app.tuning.online.slice_noise import (
    SLICES,
    Interval,
    Measured,
    Neighbours,
    SliceNoise,
    neighbours_in,
    slice_noise_of,
)
from serve_app.tuning.twin.digital_twin import TwinPlan
from serve_app.tuning.twin.traffic import TrafficLog
from serve_app.workloads.trace import Trace

MakeTwin = Callable[[Trace, Sequence[ReplicaSpec]], TwinPlan | None]
"""The twin of the values in force, for a trace and the replicas that are connected; None without a model of
them."""


class TrialReplays:
    """The replays for the trials of one roll-out.

    Args:
        traffic: the requests that are over; the caller adds to it.
    """

    def __init__(
        self, settings: RolloutSettings, rollout: Rollout, traffic: TrafficLog, make_twin: MakeTwin
    ) -> None:
        self._settings, self._rollout, self._traffic = settings, rollout, traffic
        self._make_twin = make_twin
        # The latest neighbouring slices of one side whose expectation is known.
        self._neighbours: deque[Neighbours] = deque(maxlen=SLICES)
        # Slices before the trial that are still to be replayed, and their rewards.
        self._steady: Sequence[Interval] = ()
        self._steady_rewards: Sequence[Reward] = ()
        # The replay that a trial waits for, since when, and whether it is still to be handed out; for slices
        # before the trial, their rewards.
        self._awaited: ReplayTask | None = None
        self._awaited_since, self._is_due = 0.0, False
        self._awaited_rewards: Sequence[Reward] = ()

    def prepare_trial(
        self, slices: Sequence[Interval], rewards: Sequence[Reward]
    ) -> tuple[SliceNoise, ControlVariate | None]:
        """The noise and the control variate with which a trial begins.

        Args:
            slices: intervals before the trial, under the incumbent.
            rewards: of these slices.
        """
        self._neighbours.extend(self._rollout.take_neighbours())
        known = deque(self._neighbours, maxlen=SLICES)
        known.extend(neighbours_in(Measured(reward) for reward in rewards))
        noise = slice_noise_of(known)
        if not self._settings.control_variates:
            return noise, None
        self._steady, self._steady_rewards = slices if len(slices) > 1 else (), rewards
        return noise, control_of(self._neighbours)

    def advance(self, now: float, settled_until: float, replicas: Sequence[ReplicaSpec]) -> list[Apply]:
        """Plan the replay that the trial waits for, and drop the control when one takes too long.

        Args:
            settled_until: arrival of the oldest request that is still open; `now`, when none is.
            replicas: those that are connected.
        """
        if self._awaited is not None:
            if now - self._awaited_since <= self._settings.judge_limit_s:
                return []
            self._awaited, self._is_due = None, False
            return self._rollout.drop_control(now)
        # Tested first, because this is called every second, and a trace of the traffic costs milliseconds.
        if self._rollout.target is None or not (self._steady or self._rollout.to_expect()):
            return []
        is_steady = bool(self._steady)
        task = (
            self._steady_task(settled_until, replicas)
            if is_steady
            else self._pairs_task(settled_until, replicas)
        )
        if task is not None:
            self._awaited, self._awaited_since, self._is_due = task, now, True
        elif not is_steady:
            return self._rollout.drop_control(now)
        return []

    def take_due(self) -> ReplayTask | None:
        """The replay to carry out now, once; None when there is none."""
        if not self._is_due:
            return None
        self._is_due = False
        return self._awaited

    def on_result(self, result: ReplayResult, now: float) -> list[Apply]:
        """Note the expectations of a replay; one that nobody waits for any more is ignored."""
        if result.task is not self._awaited:
            return []
        self._awaited = None
        if not result.task.numbers:
            measured = map(Measured, self._awaited_rewards, result.expected)
            self._neighbours.extend(neighbours_in(measured))
            return self._rollout.use_control(control_of(self._neighbours), now)
        expected = dict(zip(result.task.numbers, result.expected, strict=True))
        return self._rollout.expect(result.task.trial, expected, now)

    def on_failure(self, now: float) -> list[Apply]:
        """Let the trial go on without the expectation that it waits for."""
        if self._awaited is None:
            return []
        self._awaited = None
        return self._rollout.drop_control(now)

    def _steady_task(self, settled_until: float, replicas: Sequence[ReplicaSpec]) -> ReplayTask | None:
        """The replay of the slices before the trial, as many as are known and not too much work."""
        slices, self._steady = self._steady, ()
        for first in range(len(slices) - 1):
            task = self._task_of(slices[first:], settled_until, replicas)
            if task is not None:
                self._awaited_rewards = self._steady_rewards[first:]
                return task
        return None

    def _pairs_task(self, settled_until: float, replicas: Sequence[ReplicaSpec]) -> ReplayTask | None:
        """The replay of the slices whose expectation the trial waits for."""
        parts = self._rollout.to_expect()
        task = self._task_of([Interval(part.start, part.end) for part in parts], settled_until, replicas)
        if task is None:
            return None
        return replace(task, numbers=tuple(part.number for part in parts), trial=self._rollout.trials)

    def _task_of(
        self, slices: Sequence[Interval], settled_until: float, replicas: Sequence[ReplicaSpec]
    ) -> ReplayTask | None:
        """The replay of some slices; None when some of their requests are unknown, or it is too much work."""
        lead_s = self._settings.settle_s + LEAD_SLICES * self._settings.slice_s
        traffic = self._traffic.trace(settled_until)
        known = [
            arrivals
            for each in slices
            if (arrivals := self._traffic.trace_between(each.start - lead_s, each.end)) is not None
        ]
        if traffic is None or not replicas or len(known) < len(slices):
            return None
        plan = self._make_twin(traffic, replicas)
        if plan is None:
            return None
        task = ReplayTask(plan=plan, slices=tuple(known), lead_s=lead_s)
        return task if task.requests <= MAX_REQUESTS else None
