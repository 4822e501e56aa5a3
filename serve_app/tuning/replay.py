"""What would the values in force have made of the requests that came in some slices? Played in the twin.

The same requests at the same times, through the production scheduler on simulated engines. Some slices before
are played, too, beginning with what was under way then: a fleet that began empty would do better at first,
and one that began with what a candidate has left behind would not be that of the values in force. What it is
good for is said in `control_variate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.tuning.digital_twin import DigitalTwin, TwinPlan
from serve_app.tuning.objective import Reward
from serve_app.tuning.swings import Stretch, rewards_in
from serve_app.workloads.trace import Trace

LEADS_SLICES = (6, 4, 3, 2)
"""Slices that are played before the first that is asked for: as many as the traffic that is known allows."""
MOST_REQUESTS = 20_000
"""Played at once: ten seconds of a core. Where more come, fewer slices are played before."""
_REST_EVERY = 2_000
"""Events of the scheduler between two rests: some 50 ms of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """Slices to play.

    Attributes:
        plan: the twin, with what is in force, at the pace of the engines.
        arrivals: what came, from a while before the first slice to the end of the last.
        stretches: the slices in the seconds of `arrivals`, one after the other.
        numbers: what the asker calls them, if they are of a trial.
        trial: what the asker calls the trial that they are of.
    """

    plan: TwinPlan
    arrivals: Trace
    stretches: tuple[Stretch, ...]
    numbers: tuple[int, ...] = ()
    trial: int = 0


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

    plan = task.plan
    records = DigitalTwin(plan).serve(plan.space.current, task.arrivals, now_and_then)
    rest()
    expected = rewards_in(task.stretches, records, plan.objective)
    return Replayed(task=task, expected=expected, requests=len(records))
