"""Activity slots of the last minutes: counts, precision and expiry."""

import random

import pytest

from serve_app.core.commands import Conclude
from serve_app.core.events import Arrived, Event, FirstToken, Woke
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import Running
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler.journal import SLOT_S, SLOTS, Entry, RecentActivity
from tests.builders import ManualDriver, request
from tests.serving.scheduler.journals import pass_to

INTERACTIVE, BATCH = PriorityClass.INTERACTIVE, PriorityClass.BATCH


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def entry(activity: RecentActivity, event: Event) -> Entry:
    return Entry(ManualDriver().scheduler, activity._clock(), event, [])


def arrive(activity: RecentActivity, waiting: int) -> None:
    arrival = entry(activity, Arrived(request()))
    for number in range(waiting):
        arrival.core.handle(Arrived(request(f"w{number}")), 0.0)
    pass_to(activity, arrival)


def first_token(activity: RecentActivity, priority: PriorityClass, ttft_s: float) -> None:
    token = entry(activity, FirstToken("r1"))
    arrival = request(priority=priority, arrived_at=token.now - ttft_s)
    token.scheduled = ScheduledRequest(arrival, token.core.estimator.estimate(arrival), 1, ("short",))
    replica = token.core.ledger.of("s1", token.now)
    token.scheduled.running = Running(replica, 1, started=True, started_at=token.now)
    pass_to(activity, token)


def conclude(
    activity: RecentActivity, priority: PriorityClass, tenant: str, outcome: Outcome, usage: Usage | None
) -> None:
    end = entry(activity, Woke())
    ended = request(tenant=tenant, priority=priority)
    scheduled = ScheduledRequest(ended, end.core.estimator.estimate(ended), 1, ("short",), usage=usage)
    end.commands.append(Conclude(request_id="r1", gateway_id="g1", conclusion=Conclusion(outcome)))
    end.requests.append(scheduled)
    pass_to(activity, end)


def test_ends_are_counted_by_class_and_slot(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for _ in range(3):
        conclude(activity, INTERACTIVE, "a", Outcome.COMPLETED, None)
    clock.now += SLOT_S
    conclude(activity, BATCH, "b", Outcome.EXPIRED, None)
    arrive(activity, 7)
    arrive(activity, 2)
    shown = activity.document()
    first, second = shown["series"]
    assert (first["outcomes"], second["outcomes"]) == ({"completed": 3}, {"expired": 1})
    assert second["number"] == first["number"] + 1 == shown["current"]
    assert second["peak_waiting"] == 7
    minute = shown["last_minute"]
    assert minute["interactive"]["outcomes"] == {"completed": 3}
    assert minute["batch"]["outcomes"] == {"expired": 1}
    assert minute["default"]["outcomes"] == {}
    assert minute["default"]["ttft_p95_s"] is None


def test_quantiles_are_at_most_a_tenth_too_high(clock: Clock) -> None:
    activity, rng = RecentActivity(clock), random.Random(5)
    times = sorted(rng.lognormvariate(-1, 1) for _ in range(2_000))
    for ttft_s in times:
        first_token(activity, INTERACTIVE, ttft_s)
    interactive = activity.document()["last_minute"]["interactive"]
    assert interactive["first_tokens"] == 2_000
    for share in (50, 95, 99):
        exact = times[2_000 * share // 100 - 1]
        assert exact <= interactive[f"ttft_p{share}_s"] * 1.000_01
        assert interactive[f"ttft_p{share}_s"] <= exact * 1.101


def test_times_below_a_millisecond_are_shown_as_one(clock: Clock) -> None:
    activity = RecentActivity(clock)
    first_token(activity, BATCH, 0.0)
    assert activity.document()["last_minute"]["batch"]["ttft_p50_s"] == 0.001


def test_ten_minutes_are_stored_and_the_last_minute_is_separate(clock: Clock) -> None:
    activity = RecentActivity(clock)
    conclude(activity, BATCH, "old", Outcome.COMPLETED, None)
    clock.now += 120.0
    conclude(activity, BATCH, "new", Outcome.FAILED, None)
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
        arrive(activity, 1)
    assert len(activity.document()["series"]) == SLOTS


def test_a_slot_that_continues_is_sent_again(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for count in (1, 2):
        conclude(activity, BATCH, "a", Outcome.COMPLETED, None)
        assert activity.document()["series"][-1]["outcomes"] == {"completed": count}


def test_tokens_of_tenants_are_added_up_and_their_number_is_bounded(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for number in range(600):
        usage = Usage(prompt_tokens=10, output_tokens=number)
        conclude(activity, BATCH, f"t{number}", Outcome.COMPLETED, usage)
    shown = activity.document()["tenants"]
    others, largest = shown["rows"][0], shown["rows"][1]
    assert others["tenant"] == "(others)"
    assert others["tokens"] == sum(10 + number for number in range(500, 600))
    assert largest == {"priority": "batch", "tenant": "t499", "tokens": 509}
    assert shown["tokens"] == sum(10 + number for number in range(600))
    assert len(shown["rows"]) + shown["omitted"] == 501


def test_a_queue_has_grown_if_it_was_longer_in_each_of_four_slots(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for waiting in (10, 40, 20, 30, 40, 50, 60):
        arrive(activity, waiting)
        assert activity.grown_from() is None
        clock.now += SLOT_S
    assert activity.grown_from() == 20
    clock.now += SLOT_S
    assert activity.grown_from() is None, "nothing arrived in the last slot"


def test_a_few_more_requests_are_no_growth(clock: Clock) -> None:
    activity = RecentActivity(clock)
    for waiting in range(5, 10):
        arrive(activity, waiting)
        clock.now += SLOT_S
    assert activity.grown_from() is None
