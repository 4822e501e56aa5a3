"""Isolation of long prefills, and the feedback delay of engines."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.core.events import DispatchFailed, DispatchFailure, FirstToken, Woke
from serve_app.core.isolation import ALWAYS_SHORT_TOKENS, FeedbackDelay, IsolationSettings, PrefillIsolation
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.request import PriorityClass
from tests.builders import ManualDriver, dispatched, one_replica


def make_driver(**changes: Any) -> ManualDriver:
    usual = {"prior_boundary_tokens": 300, "max_long_prefills": 1, "no_short_s": 1e6}
    isolation = IsolationSettings(**{**usual, **changes})
    return one_replica(limits={"kv_tokens": 20_000}, policy="fcfs-isolated", isolation=isolation)


def isolating(lengths: Sequence[int] = (), **changes: Any) -> PrefillIsolation:
    """Return prefill isolation that has observed prompts of these lengths."""
    isolation = PrefillIsolation(IsolationSettings(**changes), FeedbackDelay(), isolates=True)
    for length in lengths:
        isolation.observe(length)
    return isolation


def test_one_long_prefill_is_in_flight_and_short_requests_pass() -> None:
    driver = make_driver()
    assert dispatched(driver.arrive("long1", prompt_tokens=500)) == [("long1", "r1")]
    assert driver.arrive("long2", prompt_tokens=500) == []
    assert dispatched(driver.arrive("short", prompt_tokens=50)) == [("short", "r1")]
    assert dispatched(driver.feed(FirstToken("long1"))) == [("long2", "r1")]


def test_a_limit_of_zero_disables_isolation() -> None:
    driver = make_driver(max_long_prefills=0)
    assert all(driver.arrive(f"long{n}", prompt_tokens=500) for n in range(3))


def test_without_short_prompts_an_iteration_is_filled_with_long_ones() -> None:
    driver = make_driver(no_short_s=2.0, no_short_long_prefills=3)
    driver.arrive("short", prompt_tokens=50)
    driver.now += 1.5
    driver.report("r1", received=1)
    sent = [bool(driver.arrive(f"long{number}", prompt_tokens=500)) for number in range(5)]
    assert sent == [True, False, False, False, False]
    assert dispatched(driver.report("r1", after_s=0.6, received=2)) == [("long1", "r1"), ("long2", "r1")]
    # The next short prompt is protected again.
    driver.arrive("another short", prompt_tokens=50)
    assert dispatched(driver.feed(FirstToken("long0"))) == []


def test_short_batch_work_is_not_protected() -> None:
    driver = make_driver(no_short_s=2.0, no_short_long_prefills=2)
    driver.now += 1.9
    driver.report("r1")
    driver.arrive("short", prompt_tokens=50, priority=PriorityClass.BATCH)
    driver.now += 0.2
    sent = [bool(driver.arrive(f"long{number}", prompt_tokens=500)) for number in range(3)]
    assert sent == [True, True, False]


def test_a_tenant_far_behind_its_share_may_have_more() -> None:
    isolation = isolating(owed_requests=10.0, max_owed=2)
    behind = (0.0, 9.9, 10.0, 25.0, 1e6)
    longest = [isolation.limits(PrefillClass.LONGEST, 0.0, each) for each in behind]
    assert longest == [(2, 1), (2, 1), (3, 2), (4, 3), (4, 3)]
    long = [isolation.limits(PrefillClass.LONG, 0.0, each) for each in behind]
    assert long == [limits[:1] for limits in longest]
    assert isolation.limits(PrefillClass.SHORT, 0.0, 1e6) == ()


def test_a_long_prefill_that_is_not_streamed_ends_after_its_usual_time() -> None:
    driver = make_driver()
    driver.arrive("long1", prompt_tokens=500, streamed=False)
    driver.arrive("long2", prompt_tokens=500)
    wake_at = driver.scheduler.next_wakeup()
    assert wake_at is not None
    assert 0 < wake_at < 1.0
    assert dispatched(driver.feed(Woke(), after_s=wake_at)) == [("long2", "r1")]


def test_a_prefill_that_began_again_on_another_replica_ends_after_its_own_time() -> None:
    driver = make_driver()
    driver.join("r2", "only", kv_tokens=20_000)
    driver.arrive("long1", prompt_tokens=500, streamed=False)
    assert driver.scheduler.ledger["r1"].prefills.long == (1, 0)
    # An unobserved prefill counts for twice its usual time.
    ends_at = 2 * driver.scheduler.prefill_costs.of("only").seconds(500)
    driver.now = ends_at / 2
    driver.feed(DispatchFailed("long1", "r1", DispatchFailure.UNREACHABLE))
    assert driver.find("long1").replica_id == "r2"
    driver.now = ends_at
    driver.feed(Woke())
    assert driver.scheduler.ledger["r2"].prefills.long == (1, 0)


def test_the_boundary_is_in_the_gap_between_two_kinds_of_traffic() -> None:
    rng = random.Random(1)
    mix = [rng.randint(32, 256) if rng.random() < 0.8 else rng.randint(1_024, 4_096) for _ in range(4_000)]
    assert 300 < isolating(mix).boundary_tokens < 900


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_the_boundary_follows_the_traffic(scale: int) -> None:
    rng = random.Random(2)
    lengths = [scale * min(8_000, max(10, round(rng.lognormvariate(6.5, 1.0)))) for _ in range(4_000)]
    boundary = isolating(lengths).boundary_tokens
    below = sum(length for length in lengths if length <= boundary) / sum(lengths)
    assert 0.1 < below < 0.4


def test_the_longest_make_up_at_most_their_share_of_the_work() -> None:
    rng = random.Random(3)
    lengths = [min(8_000, max(10, round(rng.lognormvariate(6.5, 1.0)))) for _ in range(4_000)]
    isolation = isolating(lengths)
    longest = sum(length for length in lengths if isolation.prefill_class(length) == 2) / sum(lengths)
    assert 0.3 < longest < 0.55
    assert isolation.boundary_tokens < isolation.longest_boundary_tokens


def test_a_medium_prompt_passes_the_longest() -> None:
    driver = make_driver(max_long_prefills=2, prior_longest_tokens=600)
    assert dispatched(driver.arrive("longest1", prompt_tokens=700)) == [("longest1", "r1")]
    assert driver.arrive("longest2", prompt_tokens=700) == []
    assert dispatched(driver.arrive("medium1", prompt_tokens=450)) == [("medium1", "r1")]
    assert driver.arrive("medium2", prompt_tokens=450) == []
    # The end of a medium prompt admits no longest one.
    assert dispatched(driver.feed(FirstToken("medium1"))) == [("medium2", "r1")]
    assert dispatched(driver.feed(FirstToken("longest1"))) == [("longest2", "r1")]


def test_the_prior_applies_until_enough_is_observed() -> None:
    assert isolating([50] * 100).boundary_tokens == IsolationSettings().prior_boundary_tokens


def test_equal_lengths_are_of_one_class() -> None:
    isolation = isolating([700] * 400)
    assert isolation.prefill_class(600) is PrefillClass.SHORT
    assert {isolation.prefill_class(length) for length in (680, 700, 720)} == {PrefillClass.LONG}
    assert repr(isolation).startswith("<PrefillIsolation on")


@pytest.mark.parametrize("lengths", [[20] * 400, list(range(10, 60)) * 10, list(range(20, 200)) * 4])
def test_a_prompt_of_one_chunk_is_short_whatever_the_traffic(lengths: Sequence[int]) -> None:
    isolation = isolating(lengths)
    assert isolation.prefill_class(ALWAYS_SHORT_TOKENS) is PrefillClass.SHORT
    assert isolation.prefill_class(ALWAYS_SHORT_TOKENS + 1) is not PrefillClass.SHORT


# -- feedback delay ---------------------------------------------------------------------------------------


def measured(delay_s: float, *, long_s: float, count: int = 200, seed: int = 0) -> FeedbackDelay:
    """Return the delay of a fleet in which short requests also wait for up to 0.5 s."""
    rng, delay = random.Random(seed), FeedbackDelay()
    for _ in range(count):
        delay.on_short_first_token(delay_s + rng.uniform(0.0, 0.5))
        delay.on_long_first_token(delay_s + long_s)
    return delay


@pytest.mark.parametrize("seed", range(5))
def test_the_minimum_is_exact(seed: int) -> None:
    rng, delay, seen = random.Random(seed), FeedbackDelay(), []
    for _ in range(500):
        seen.append(rng.choice([rng.uniform(-0.1, 1.0), 0.3]))
        delay.on_short_first_token(seen[-1])
        assert delay.seconds == (max(0.0, min(seen[-64:])) if len(seen) >= 16 else 0.0)


def test_limits_grow_by_the_share_of_the_time_that_feedback_takes() -> None:
    assert measured(0.4, long_s=0.4).limit_factor(0.0) == pytest.approx(2.0, rel=0.1)
    assert measured(0.4, long_s=4.0).limit_factor(0.0) == pytest.approx(1.1, rel=0.1)
    assert measured(0.01, long_s=0.4).limit_factor(0.05) == 1.0
    assert FeedbackDelay().limit_factor(0.0) == 1.0
    # The factor is bounded, whatever the clocks report.
    assert measured(5.0, long_s=-4.9).limit_factor(0.0) <= 10.0


def test_delayed_feedback_admits_more_long_prefills_and_prompt_feedback_none() -> None:
    settings = IsolationSettings(max_long_prefills=2, max_longest_prefills=1, no_short_s=1e6)
    for delay_s, limits in ((0.01, (2, 1)), (0.45, (4, 2))):
        delay = measured(delay_s, long_s=0.4)
        isolation = PrefillIsolation(settings, delay, isolates=True)
        assert isolation.limits(PrefillClass.LONGEST, 0.0) == limits
        assert isolation.limits(PrefillClass.SHORT, 0.0) == ()
