"""The slots of the last minutes: what they count, how exact they are, and what they forget."""

import random

import pytest

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler.dashboard.recent_activity import SLOT_S, SLOTS, RecentActivity

INTERACTIVE, BATCH = PriorityClass.INTERACTIVE, PriorityClass.BATCH


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_ends_are_counted_by_class_and_slot(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for _ in range(3):
        activity.on_conclusion(INTERACTIVE, "a", Outcome.COMPLETED, None)
    clock.now += SLOT_S
    activity.on_conclusion(BATCH, "b", Outcome.EXPIRED, None)
    activity.on_arrival(7)
    activity.on_arrival(2)
    shown = activity.document()
    first, second = shown["series"]
    assert (first["outcomes"], second["outcomes"]) == ({"completed": 3}, {"expired": 1})
    assert second["number"] == first["number"] + 1 == shown["current"]
    assert second["most_waiting"] == 7
    minute = shown["last_minute"]
    assert minute["interactive"]["outcomes"] == {"completed": 3}
    assert minute["batch"]["outcomes"] == {"expired": 1}
    assert minute["default"]["outcomes"] == {}
    assert minute["default"]["ttft_p95_s"] is None


def test_quantiles_are_at_most_a_tenth_too_high(clock: Clock) -> None:
    activity, rng = RecentActivity(clock), random.Random(5)
    times = sorted(rng.lognormvariate(-1, 1) for _ in range(2_000))
    for ttft_s in times:
        activity.on_first_token(INTERACTIVE, ttft_s)
    told = activity.document()["last_minute"]["interactive"]
    assert told["first_tokens"] == 2_000
    for share in (50, 95, 99):
        exact = times[2_000 * share // 100 - 1]
        assert exact <= told[f"ttft_p{share}_s"] * 1.000_01
        assert told[f"ttft_p{share}_s"] <= exact * 1.101


def test_times_below_a_millisecond_are_told_as_one(clock: Clock) -> None:
    activity = RecentActivity(clock)
    activity.on_first_token(BATCH, 0.0)
    assert activity.document()["last_minute"]["batch"]["ttft_p50_s"] == 0.001


def test_ten_minutes_are_kept_and_the_last_minute_is_told_apart(clock: Clock) -> None:
    activity = RecentActivity(clock)
    activity.on_conclusion(BATCH, "old", Outcome.COMPLETED, None)
    clock.now += 120.0
    activity.on_conclusion(BATCH, "new", Outcome.FAILED, None)
    shown = activity.document()
    assert shown["last_minute"]["batch"]["outcomes"] == {"failed": 1}
    assert shown["last_minutes"]["batch"]["outcomes"] == {"failed": 1, "completed": 1}
    assert shown["known_s"] == 120.0
    clock.now += SLOT_S * SLOTS - 60.0
    shown = activity.document()
    assert shown["last_minutes"]["batch"]["outcomes"] == {"failed": 1}
    assert shown["known_s"] == SLOT_S * SLOTS
    for _ in range(3 * SLOTS):
        clock.now += SLOT_S
        activity.on_arrival(1)
    assert len(activity.document()["series"]) == SLOTS


def test_a_slot_that_goes_on_is_told_anew(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for count in (1, 2):
        activity.on_conclusion(BATCH, "a", Outcome.COMPLETED, None)
        assert activity.document()["series"][-1]["outcomes"] == {"completed": count}


def test_tokens_of_tenants_are_added_up_and_their_number_is_bounded(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for number in range(600):
        usage = Usage(prompt_tokens=10, output_tokens=number)
        activity.on_conclusion(BATCH, f"t{number}", Outcome.COMPLETED, usage)
    shown = activity.document()["tenants"]
    others, largest = shown["rows"][0], shown["rows"][1]
    assert others["tenant"] == "(others)"
    assert others["tokens"] == sum(10 + number for number in range(500, 600))
    assert largest == {"priority": "batch", "tenant": "t499", "tokens": 509}
    assert shown["tokens"] == sum(10 + number for number in range(600))
    assert len(shown["rows"]) + shown["left_out"] == 501
