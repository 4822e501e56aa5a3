import random
from typing import Any

import pytest

from serve_app.request import PriorityClass
from serve_app.routing.pools import RoutingSettings
from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.commands import Dispatch
from serve_app.scheduling.events import FirstToken, Woke
from serve_app.scheduling.isolation.feedback_delay import FeedbackDelay
from serve_app.scheduling.isolation.prefill_isolation import IsolationSettings, PrefillIsolation
from tests.builders import Simulation, dispatched


def world(**changes: Any) -> Simulation:
    usual = {"prior_boundary_tokens": 300, "max_long_prefills": 1, "no_short_s": 1e6}
    isolation = IsolationSettings(**{**usual, **changes})
    made = Simulation(policy="fcfs-isolated", isolation=isolation, routing=RoutingSettings(pools=("only",)))
    made.join("r1", "only", kv_tokens=20_000)
    return made


def test_one_long_prefill_is_in_flight_and_short_requests_pass() -> None:
    made = world()
    assert dispatched(made.arrive("long1", prompt_tokens=500)) == [("long1", "r1")]
    assert made.arrive("long2", prompt_tokens=500) == []
    assert dispatched(made.arrive("short", prompt_tokens=50)) == [("short", "r1")]
    assert dispatched(made.feed(FirstToken("long1"))) == [("long2", "r1")]


def test_two_may_be_allowed() -> None:
    made = world(max_long_prefills=2)
    sent = [bool(made.arrive(f"long{n}", prompt_tokens=500)) for n in range(3)]
    assert sent == [True, True, False]


def test_zero_switches_it_off() -> None:
    made = world(max_long_prefills=0)
    assert all(made.arrive(f"long{n}", prompt_tokens=500) for n in range(3))


def test_long_prefills_spread_over_replicas() -> None:
    made = world()
    made.join("r2", "only", kv_tokens=10_000)
    assert dispatched(made.arrive("long1", prompt_tokens=500)) == [("long1", "r1")]
    assert dispatched(made.arrive("long2", prompt_tokens=500)) == [("long2", "r2")]


def test_the_long_are_relieved_when_the_first_has_waited() -> None:
    made = world(relief_s=10.0, max_relief=1)
    made.arrive("long1", prompt_tokens=500)
    made.arrive("long2", prompt_tokens=500)
    for _ in range(9):
        assert made.report("r1", after_s=1.0, received=1) == []
    assert dispatched(made.report("r1", after_s=1.0, received=1)) == [("long2", "r1")]


def test_where_no_short_prompt_comes_an_iteration_may_be_filled_with_long_ones() -> None:
    made = world(no_short_s=2.0, no_short_long_prefills=3)
    made.arrive("short", prompt_tokens=50)
    made.now += 1.5
    made.report("r1", received=1)
    sent = [bool(made.arrive(f"long{number}", prompt_tokens=500)) for number in range(5)]
    assert sent == [True, False, False, False, False]
    assert dispatched(made.report("r1", after_s=0.6, received=2)) == [("long1", "r1"), ("long2", "r1")]
    # Whoever is under way stays; the next short prompt is protected again.
    made.arrive("another short", prompt_tokens=50)
    assert dispatched(made.feed(FirstToken("long0"))) == []


def test_short_batch_work_is_not_protected() -> None:
    made = world(no_short_s=2.0, no_short_long_prefills=2)
    made.now += 1.9
    made.report("r1")
    made.arrive("short", prompt_tokens=50, priority=PriorityClass.BATCH)
    made.now += 0.2
    assert [bool(made.arrive(f"long{number}", prompt_tokens=500)) for number in range(3)] == [
        True,
        True,
        False,
    ]


def test_a_tenant_far_behind_its_share_may_have_more() -> None:
    isolation = PrefillIsolation(
        IsolationSettings(owed_requests=10.0, max_owed=2), FeedbackDelay(), wanted=True
    )
    behind = (0.0, 9.9, 10.0, 25.0, 1e6)
    assert [isolation.limits(PrefillClass.LONG, 0.0, 0.0, each) for each in behind] == [
        (2,),
        (2,),
        (3,),
        (4,),
        (4,),
    ]


def test_relief_has_an_end() -> None:
    isolation = PrefillIsolation(IsolationSettings(relief_s=1.0, max_relief=2), FeedbackDelay(), wanted=True)
    waits_s = (0.0, 0.9, 1.0, 2.5, 100.0)
    assert [isolation.limits(PrefillClass.LONG, 0.0, waited_s) for waited_s in waits_s] == [
        (2,),
        (2,),
        (3,),
        (4,),
        (4,),
    ]
    assert [isolation.limits(PrefillClass.LONGEST, 0.0, waited_s) for waited_s in waits_s] == [
        (2, 1),
        (2, 1),
        (3, 2),
        (4, 3),
        (4, 3),
    ]
    assert isolation.limits(PrefillClass.SHORT, 0.0, 100.0) == ()


def test_an_unstreamed_long_prefill_is_over_after_its_usual_time() -> None:
    made = world()
    made.arrive("long1", prompt_tokens=500, streamed=False)
    made.arrive("long2", prompt_tokens=500)
    wake_at = made.scheduler.next_wakeup()
    assert wake_at is not None
    assert 0 < wake_at < 1.0
    (command,) = made.feed(Woke(), after_s=wake_at)
    assert isinstance(command, Dispatch)
    assert command.request_id == "long2"


def learned(lengths: list[int]) -> float:
    isolation = PrefillIsolation(IsolationSettings(), FeedbackDelay(), wanted=True)
    for length in lengths:
        isolation.observe(length)
    return isolation.boundary_tokens


def test_the_boundary_stands_in_the_gap_between_two_kinds_of_traffic() -> None:
    rng = random.Random(1)
    mix = [rng.randint(32, 256) if rng.random() < 0.8 else rng.randint(1_024, 4_096) for _ in range(4_000)]
    assert 300 < learned(mix) < 900


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_the_boundary_follows_the_traffic(scale: int) -> None:
    rng = random.Random(2)
    lengths = [scale * min(8_000, max(10, round(rng.lognormvariate(6.5, 1.0)))) for _ in range(4_000)]
    boundary = learned(lengths)
    below = sum(length for length in lengths if length <= boundary) / sum(lengths)
    assert 0.1 < below < 0.4


def graded(lengths: list[int]) -> PrefillIsolation:
    isolation = PrefillIsolation(IsolationSettings(), FeedbackDelay(), wanted=True)
    for length in lengths:
        isolation.observe(length)
    return isolation


def test_the_longest_make_up_at_most_their_share_of_the_work() -> None:
    rng = random.Random(3)
    lengths = [min(8_000, max(10, round(rng.lognormvariate(6.5, 1.0)))) for _ in range(4_000)]
    isolation = graded(lengths)
    longest = sum(length for length in lengths if isolation.prefill_class(length) == 2) / sum(lengths)
    assert 0.3 < longest < 0.55
    assert isolation.boundary_tokens < isolation.longest_boundary_tokens


def test_a_medium_prompt_passes_the_longest() -> None:
    made = world(max_long_prefills=2, prior_longest_tokens=600)
    assert dispatched(made.arrive("longest1", prompt_tokens=700)) == [("longest1", "r1")]
    assert made.arrive("longest2", prompt_tokens=700) == []
    assert dispatched(made.arrive("medium1", prompt_tokens=450)) == [("medium1", "r1")]
    assert made.arrive("medium2", prompt_tokens=450) == []
    # The place that a medium prompt leaves is not for the longest.
    assert dispatched(made.feed(FirstToken("medium1"))) == [("medium2", "r1")]
    assert dispatched(made.feed(FirstToken("longest1"))) == [("longest2", "r1")]


def test_before_enough_is_seen_the_prior_holds() -> None:
    assert learned([50] * 100) == IsolationSettings().prior_boundary_tokens


def test_equal_lengths_are_all_short() -> None:
    isolation = PrefillIsolation(IsolationSettings(), FeedbackDelay(), wanted=True)
    for _ in range(400):
        isolation.observe(700)
    assert isolation.prefill_class(300) == 0
    assert isolation.prefill_class(700) <= 1
    assert repr(isolation).startswith("<PrefillIsolation on")


@pytest.mark.parametrize(
    "change",
    [
        {"max_long_prefills": -1},
        {"max_relief": -1},
        {"max_longest_prefills": 0},
        {"short_work_share": 1.0},
        {"relief_s": 0.0},
        {"min_observations": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=rf"isolation\.{name} must "):
        IsolationSettings(**change)  # type: ignore[arg-type]
