"""What would the values in force have made of the requests that came in some slices? Played in the twin.

The same requests at the same times, through the production scheduler on simulated engines: each slice by
itself, after a lead of two more, on a fleet that is empty before that. So what is expected depends on what
arrived and on nothing that either side of a trial has left behind, and no slice of a pair has a longer lead
than the other. (A longer lead, or one that begins with what was under way, explains less: near saturation
what is left of one side's queue goes over into the other side's slice, and a fleet that had neither knows
nothing of it.) What it is good for is said in `control_variate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.tuning.objective.objective import Reward, reward_of
from serve_app.tuning.twin.digital_twin import DigitalTwin, TwinPlan
from serve_app.workloads.trace import Trace

LEAD_SLICES = 2
"""Slices that are played before each that is asked for."""
MOST_REQUESTS = 30_000
"""Played for one task: some fifteen seconds of a core."""
_REST_EVERY = 2_000
"""Events of the scheduler between two rests: some 50 ms of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """Slices to play.

    Attributes:
        plan: the twin, with what is in force, at the pace of the engines.
        slices: each with its lead.
        lead_s: how long that is; what came later is measured.
        numbers: what the asker calls them, if they are of a trial.
        trial: what the asker calls the trial that they are of.
    """

    plan: TwinPlan
    slices: tuple[Trace, ...]
    lead_s: float
    numbers: tuple[int, ...] = ()
    trial: int = 0

    @property
    def requests(self) -> int:
        """To be simulated."""
        return sum(len(trace.requests) for trace in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of it.

    Attributes:
        expected: the reward of each slice.
        requests: simulated.
        seconds: that it took.
    """

    task: ReplayTask
    expected: Sequence[Reward]
    requests: int
    seconds: float = 0.0


def replay(task: ReplayTask, rest: Callable[[], object] = lambda: None) -> Replayed:
    """Play the slices, in this thread.

    Args:
        rest: called now and then: where whoever may take only a share of a core waits.
    """
    events = 0

    def now_and_then(_: object) -> None:
        nonlocal events
        events += 1
        if events % _REST_EVERY == 0:
            rest()

    twin, expected, requests = DigitalTwin(task.plan), list[Reward](), 0
    for arrivals in task.slices:
        records = twin.serve(task.plan.space.current, arrivals, now_and_then)
        requests += len(records)
        measured = [record for record in records if record.arrived_at >= task.lead_s]
        expected.append(reward_of(measured, task.plan.objective))
        rest()
    return Replayed(task=task, expected=expected, requests=requests)
