"""Delay bound: turns of long prompts, and catch-up for a prompt that was passed too long."""

import pytest

from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.queueing.delay_bound import DelayBound, DelayBoundSettings
from serve_app.core.request import Attempts, ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.lab.simulation.run import ONE_POOL, FleetSettings, RunSettings, simulate
from serve_app.lab.simulation.simulation import FixedPartition
from serve_app.lab.workloads import TraceChoice
from tests.builders import scheduled_request


def prompt(
    name: str, tokens: int, arrived_at: float, prefill_class: PrefillClass = PrefillClass.LONG
) -> ScheduledRequest:
    scheduled = scheduled_request(name, prompt_tokens=tokens, arrived_at=arrived_at)
    scheduled.prefill_class = prefill_class
    return scheduled


class BoundedQueue:
    """A bound, and the waiting prompts, shortest first by score."""

    def __init__(self, **changes: float) -> None:
        self.bound = DelayBound(DelayBoundSettings(**changes))
        self.waiting: list[ScheduledRequest] = []

    def add(self, *prompts: ScheduledRequest) -> None:
        for each in prompts:
            self.bound.join(each)
            self.waiting.append(each)
        self.waiting.sort(key=lambda each: each.prefill_tokens)

    def heads(self, now: float) -> list[str]:
        return [each.request.request_id for each in self.bound.arrange(self.waiting, now)]

    def take(self, name: str, now: float) -> None:
        (taken,) = (each for each in self.waiting if each.request.request_id == name)
        self.waiting.remove(taken)
        self.bound.leave(taken, now)


def backlog() -> BoundedQueue:
    """Eight seconds of wait under FCFS, and a long prompt that the others passed."""
    line = BoundedQueue(wait_ratio=1.5)
    line.add(prompt("long", 4_000, 0.0), *(prompt(f"p{at}", 2_000, float(at)) for at in range(1, 9)))
    for at in range(1, 9):
        line.take(f"p{at}", 8.0)
    return line


def test_a_prompt_whose_turn_has_not_come_is_passed() -> None:
    line = BoundedQueue()
    line.add(prompt("first", 2_000, 0.0), prompt("long", 4_000, 0.0), prompt("fresh", 1_500, 50.0))
    assert line.heads(100.0) == ["fresh", "first", "long"]
    line.take("fresh", 100.0)
    # Less work was dispatched than arrived before it.
    assert line.heads(200.0) == ["first", "long"]


def test_a_prompt_is_first_once_it_waited_longer_than_the_longest_turn_times_the_ratio() -> None:
    line = backlog()
    line.add(prompt("fresh", 2_500, 8.0))
    assert line.bound.longest_s(8.0) == pytest.approx(8.0)
    assert line.heads(11.0) == ["fresh", "long"]
    assert line.heads(12.0) == ["long", "fresh"]


def test_prompts_much_shorter_than_the_overdue_one_still_pass_it() -> None:
    line = backlog()
    line.add(prompt("less", 1_600, 8.0), prompt("more", 1_601, 8.0))
    assert line.heads(12.0) == ["less", "long", "more"]


def test_overdue_prompts_are_in_order_of_arrival() -> None:
    line = BoundedQueue(wait_ratio=1.0)
    line.add(prompt("older", 4_000, 0.0), prompt("younger", 3_000, 1.0), prompt("p", 8_000, 2.0))
    line.take("p", 2.0)
    assert line.heads(2.0) == ["older", "younger"]


def test_the_longest_turn_fades_so_that_a_burst_is_forgotten() -> None:
    line = backlog()
    assert line.bound.longest_s(8.0 + 120.0) == pytest.approx(4.0)
    assert line.bound.longest_s(8.0 + 1_200.0) == pytest.approx(8.0 / 1_024)


def test_short_prompts_and_returned_ones_have_no_turn() -> None:
    line = BoundedQueue()
    short, returned = prompt("s", 100, 0.0, PrefillClass.SHORT), prompt("r", 4_000, 0.0)
    returned.attempts = Attempts(returned=True)
    line.add(short, returned)
    assert (short.fcfs_turn, returned.fcfs_turn) == (None, None)
    line.take("s", 10.0)
    line.take("r", 10.0)
    assert line.bound.longest_s(10.0) == 0.0


def test_a_ratio_of_zero_leaves_the_order_to_the_score() -> None:
    line = BoundedQueue(wait_ratio=0.0)
    line.add(prompt("long", 4_000, 0.0), prompt("fresh", 2_000, 8.0), prompt("p", 4_000, 8.0))
    line.take("p", 8.0)
    assert line.heads(1_000.0) == ["fresh", "long"]


# So fine that the score alone would serve long prompts by length.
_QUEUES = Partition(
    tuple(
        LengthInterval(min_tokens=low + 1, max_tokens=low + 200, mean_tokens=low + 100.0, count=1)
        for low in range(0, 4_400, 200)
    )
)


def longest_wait_s(policy: str, **scheduler: object) -> float:
    """Return the longest wait of a long prompt of the paper's mix, on one engine near saturation."""
    settings = RunSettings(
        policy=policy,
        fleet=FleetSettings(profile="llama2-70b-h100-tp4", replicas={ONE_POOL: 1}),
        trace=TraceChoice(name="paper-mix", requests=1_500),
        rate_per_s=9.4,
        scheduler=scheduler,
        partition=FixedPartition(_QUEUES),
    )
    longest = simulate(settings).summary.queue_wait_s.long.max
    assert longest is not None
    return longest


@pytest.mark.application
def test_near_saturation_the_longest_prompts_wait_hardly_longer_than_first_come_first_served() -> None:
    in_order = longest_wait_s("fcfs-isolated")
    assert longest_wait_s("ewsjf") < 1.25 * in_order
    # Without the bound, the score alone decides.
    assert longest_wait_s("ewsjf", **{"delay_bound.wait_ratio": 0.0}) > 2.0 * in_order
