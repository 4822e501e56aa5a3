"""The replay of slices in the twin: what the values in force would have made of their requests.

The same requests arrive at the same times, at the production scheduler on simulated engines. Each slice is
played by itself, after a lead of two more slices, on a fleet that is empty before that. So the expectation
depends on the arrivals alone and not on what either side of a trial left behind, and both slices of a pair
have leads of the same length. A longer lead, or one that begins with the requests under way, explains less:
near saturation the rest of one side's queue would reach into the other side's slice.

The purpose is explained in `control_variate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.tuning.objective.objective import Reward, reward_of
from serve_app.tuning.twin.digital_twin import DigitalTwin, TwinPlan
from serve_app.tuning.twin.rests import resting
from serve_app.workloads.trace import Trace

LEAD_SLICES = 2
"""Slices that are played as a lead before each slice of a task."""
MAX_REQUESTS = 30_000
"""Requests simulated for one task at most: some fifteen seconds of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """Slices to play.

    Attributes:
        plan: the twin, with the values in force, at the speed of the engines.
        slices: each with its lead.
        lead_s: length of the lead; later arrivals are measured.
        numbers: numbers of the slices in their trial; empty for slices before a trial.
        trial: number of that trial.
    """

    plan: TwinPlan
    slices: tuple[Trace, ...]
    lead_s: float
    numbers: tuple[int, ...] = ()
    trial: int = 0

    @property
    def requests(self) -> int:
        """Requests to simulate."""
        return sum(len(trace.requests) for trace in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        expected: the reward of each slice.
        requests: simulated.
        seconds: duration of the replay.
    """

    task: ReplayTask
    expected: Sequence[Reward]
    requests: int
    seconds: float = 0.0


def replay(task: ReplayTask, rest: Callable[[], object] = lambda: None) -> ReplayResult:
    """Play the slices, in this thread.

    Args:
        rest: called now and then; a driver that may use only a share of a core waits there.
    """
    on_event = resting(rest)
    twin, expected, requests = DigitalTwin(task.plan), list[Reward](), 0
    for arrivals in task.slices:
        records = twin.serve(task.plan.space.current, arrivals, on_event)
        requests += len(records)
        measured = [record for record in records if record.arrived_at >= task.lead_s]
        expected.append(reward_of(measured, task.plan.objective))
        rest()
    return ReplayResult(task=task, expected=expected, requests=requests)
