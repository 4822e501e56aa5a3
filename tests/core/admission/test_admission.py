"""Admission: deadlines, queue limits, reservations for retries, and outages."""

import itertools
import math

import pytest

from serve_app.core.admission.admission import (
    RETRY_AFTER_CAP_S,
    QueueLimit,
    ReservedWork,
    RetryReservations,
    fair_work,
)
from serve_app.core.commands import Conclude
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, ReplicaLost, Woke
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings import AdmissionSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from tests.builders import (
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    only_conclusion,
    request,
    retry_after_s,
    two_pools,
)


def saturated(**changes: object) -> ManualDriver:
    """Return one replica whose engine queue is full."""
    driver = one_replica("s1", limits={"max_num_seqs": 1}, **changes)
    for number in range(3):
        driver.arrive(f"f{number}", tenant="filler")
    return driver


def settled() -> ManualDriver:
    """Return a steady backlog of eight requests, with one dispatch per second."""
    driver = saturated()
    for number in range(8):
        driver.arrive(f"w{number}", tenant="filler")
    for number in range(8, 60):
        driver.arrive(f"w{number}", tenant="filler")
        finish_oldest(driver)
    return driver


def finish_oldest(driver: ManualDriver) -> None:
    """Finish the oldest request a second later, so another is dispatched."""
    running = [scheduled for scheduled in driver.scheduler.requests.values() if not scheduled.queued]
    oldest = min(running, key=lambda scheduled: scheduled.sequence)
    driver.report(waiting=3, after_s=1.0)
    assert len(dispatched(driver.feed(Finished(oldest.request.request_id, Outcome.COMPLETED)))) == 1


def test_a_deadline_that_cannot_be_met_is_rejected_on_arrival_with_a_retry_after() -> None:
    driver = settled()
    waiting = len(driver.scheduler.queue)
    assert waiting == 8
    rejection = only_conclusion(driver.arrive("r", tenant="filler", expires_at=driver.now + 4.0))
    assert rejection.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE
    assert "queue timeout is 4.0 s" in rejection.message
    # Eight seconds of work must drain to four, less the margin.
    assert rejection.retry_after_s == pytest.approx(waiting - 4.0 / 1.2, abs=2.0)
    assert driver.arrive("patient", tenant="filler", expires_at=driver.now + 20.0) == []


def test_a_request_that_returns_on_time_is_admitted_before_newcomers() -> None:
    driver = settled()
    rejected = driver.arrive("r1", prompt_tokens=33, tenant="filler", expires_at=driver.now + 4.0)
    until, number = driver.now + retry_after_s(rejected), 0
    while driver.now + 1.0 < until:
        finish_oldest(driver)
        number += 1
        newcomer = driver.arrive(f"n{number}", tenant="filler", expires_at=driver.now + 4.0)
        assert driver.now + retry_after_s(newcomer) > until
    driver.now = until
    assert driver.arrive("r1 again", prompt_tokens=33, tenant="filler", expires_at=driver.now + 4.0) == []


def test_a_full_queue_does_not_reject_a_request_that_fits_a_replica_at_once() -> None:
    driver = ManualDriver(max_waiting=1)
    driver.join("s1", "short", max_num_seqs=1)
    driver.join("l1", "long", max_model_len=4_000)
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    driver.arrive("waits", prompt_tokens=2_000)
    assert concluded(driver.arrive("long", prompt_tokens=2_000)) == [("long", "rejected_queue_full")]
    assert dispatched(driver.arrive("short", prompt_tokens=20)) == [("short", "s1")]


def test_a_heavy_tenant_is_rejected_while_a_light_one_is_admitted() -> None:
    driver = saturated(max_waiting=20)
    heavy = [driver.arrive(f"h{number}", tenant="heavy") for number in range(30)]
    assert sum(commands == [] for commands in heavy) == 15
    assert concluded(heavy[-1]) == [("h29", "rejected_queue_full")]
    assert "of this tenant" in only_conclusion(heavy[-1]).message
    assert driver.arrive("light", tenant="light") == []


def test_a_light_tenant_is_admitted_however_many_are_heavy() -> None:
    driver = saturated(max_waiting=40)
    for number in range(200):
        driver.arrive(f"h{number}", tenant=f"heavy{number % 3}")
    assert driver.arrive("light", tenant="light") == []


def test_retries_that_a_heavy_tenant_was_promised_leave_a_light_one_its_places() -> None:
    driver = saturated(max_waiting=20)
    for number in range(15):
        driver.arrive(f"first{number}", tenant="heavy")
    for number in range(60):
        # One request leaves each second, so that rejected ones get a time for their retry.
        finish_oldest(driver)
        for again in range(5):
            driver.arrive(f"h{number}-{again}", tenant="heavy", prompt_tokens=40 + again)
    assert len(driver.scheduler.admission.retry_reservations) > 20
    assert len(driver.scheduler.queue) < 18
    assert driver.arrive("light", tenant="light") == []


def test_the_last_queued_request_expires_however_small_the_share_of_its_tenant_is() -> None:
    driver = saturated(max_waiting=2, admission=AdmissionSettings(tenant_share=0.3))
    driver.arrive("r", expires_at=1.0)
    expired = driver.report(waiting=3, after_s=1.0)
    assert concluded(expired) == [("r", "expired")]
    assert retry_after_s(expired) <= 1.25


@pytest.mark.parametrize("own", [0, 1, 3])
def test_at_a_full_queue_retry_after_is_when_a_request_of_any_tenant_leaves(own: int) -> None:
    driver = saturated(max_waiting=20)
    for number in range(18 - own):
        driver.arrive(f"o{number}", tenant=f"other{number}")
    for number in range(60):
        # One request leaves each second.
        finish_oldest(driver)
        driver.arrive(f"n{number}", tenant=f"new{number}")
    for number in range(own):
        driver.arrive(f"own{number}", tenant="own")
    assert len(driver.scheduler.queue) == 18
    rejection = only_conclusion(driver.arrive("r", tenant="own"))
    assert rejection.retry_after_s == pytest.approx(1.0, abs=0.4)
    assert "the queue of m is full" in rejection.message


@pytest.mark.parametrize(
    ("priority", "places"),
    [(PriorityClass.BATCH, 16), (PriorityClass.DEFAULT, 18), (PriorityClass.INTERACTIVE, 20)],
)
def test_lower_classes_leave_a_share_of_the_queue_to_higher_ones(
    priority: PriorityClass, places: int
) -> None:
    driver = saturated(max_waiting=20, admission=AdmissionSettings(tenant_share=1.0))
    answers = [driver.arrive(f"r{number}", priority=priority) for number in range(25)]
    assert sum(commands == [] for commands in answers) == places


def test_an_expired_request_gets_a_retry_after() -> None:
    driver = settled()
    driver.arrive("r", tenant="filler", expires_at=driver.now + 20.0)
    commands = [command for _ in range(20) for command in driver.report(waiting=3, after_s=1.0)]
    expired = [command for command in commands if isinstance(command, Conclude)]
    assert concluded(expired) == [("r", "expired")]
    assert retry_after_s(expired) > 0


# -- reservations for rejected requests that return -------------------------------------------------------


@pytest.fixture
def reservations() -> RetryReservations:
    return RetryReservations()


def admissible_in_s(
    reservations: RetryReservations,
    level: float,
    now: float = 0.0,
    *,
    limit: float = 50.0,
    per_s: float = 10.0,
) -> float:
    queue = QueueLimit(level=level, drain_per_s=per_s, limit=limit)
    return reservations.admissible_in_s(queue, lambda reserved: float(reserved.tokens), now)


def test_a_limit_allows_a_request_when_the_queue_has_drained_to_it(reservations: RetryReservations) -> None:
    assert admissible_in_s(reservations, 50.0) == 0.0
    assert admissible_in_s(reservations, 90.0) == 4.0
    assert admissible_in_s(reservations, 90.0, per_s=0.0) == math.inf


def test_requests_rejected_later_get_a_later_retry_after(reservations: RetryReservations) -> None:
    delays_s = []
    for number in range(5):
        delays_s.append(admissible_in_s(reservations, 90.0))
        reservations.reserve(request(f"r{number}", prompt_tokens=number + 1), 20, delays_s[-1], 0.0)
    assert delays_s == sorted(delays_s)
    assert all(later - earlier >= 2.0 for earlier, later in itertools.pairwise(delays_s[1:]))


def test_a_newcomer_takes_only_capacity_that_is_free_before_the_reserved_work_is_due(
    reservations: RetryReservations,
) -> None:
    reservations.reserve(request(prompt_tokens=1), 60, 20.0, 0.0)
    assert admissible_in_s(reservations, 45.0, limit=80.0) == 0.0
    assert admissible_in_s(reservations, 45.0, limit=80.0, per_s=1.0) > 20.0


def test_a_returning_request_claims_its_reservation_once(reservations: RetryReservations) -> None:
    reservations.reserve(request("first", prompt_tokens=70), 80, 10.0, 0.0)
    assert not reservations.claim(request("early", prompt_tokens=70), 5.0)
    assert not reservations.claim(request("another length", prompt_tokens=71), 10.0)
    assert not reservations.claim(request("another tenant", prompt_tokens=70, tenant="t2"), 10.0)
    assert reservations.claim(request("second", prompt_tokens=70), 10.0)
    assert not reservations.claim(request("third", prompt_tokens=70), 10.0)
    assert len(reservations) == 0
    assert admissible_in_s(reservations, 0.0, 10.0) == 0.0


def test_of_equal_requests_the_earliest_reservation_is_claimed(reservations: RetryReservations) -> None:
    for due_at in (8.0, 3.0, 40.0):
        reservations.reserve(request(), 10, due_at, 0.0)
    assert [reservations.claim(request(), 10.0) for _ in range(3)] == [True, True, False]
    assert len(reservations) == 1


def test_the_requests_of_one_burst_do_not_claim_the_reservations_of_each_other(
    reservations: RetryReservations,
) -> None:
    """The requests are alike, and the first one's `Retry-After` is within the tolerance for early returns."""
    delays_s = []
    for _ in range(5):
        assert not reservations.claim(request(), 0.0)
        delays_s.append(admissible_in_s(reservations, 50.5))
        reservations.reserve(request(), 20, delays_s[-1], 0.0)
    assert delays_s[0] < 0.1
    assert delays_s[-1] > 3.0
    assert reservations.claim(request(), delays_s[0])


def test_an_unclaimed_reservation_is_dropped_and_lowers_the_weight_of_others(
    reservations: RetryReservations,
) -> None:
    for number in range(60):
        reservations.reserve(request(prompt_tokens=number + 1), 10, 1.0, 0.0)
    reservations.expire(3.9)
    assert len(reservations) == 60
    reservations.expire(5.0)
    assert len(reservations) == 0
    assert reservations.claim_rate < 0.2
    reservations.reserve(request(), 400, 1.0, 5.0)
    assert admissible_in_s(reservations, 0.0, 5.0, limit=200.0) == 0.0


def test_the_number_of_reservations_is_bounded(reservations: RetryReservations) -> None:
    answers = [
        reservations.reserve(request(prompt_tokens=number + 1), 10, 1.0, 0.0) for number in range(4_050)
    ]
    assert answers == [True] * 4_000 + [False] * 50
    assert len(reservations) == 4_000


def test_each_other_tenant_counts_at_most_as_much_as_the_own() -> None:
    light = request(tenant="light")
    work_of = fair_work(light, 100, lambda reserved: float(reserved.tokens))
    rank = PriorityClass.DEFAULT.rank
    assert work_of(ReservedWork(rank, "heavy", 1, 70)) == 70
    assert work_of(ReservedWork(rank, "heavy", 9, 900)) == 30
    assert work_of(ReservedWork(rank, "heavy", 9, 900)) == 0
    assert work_of(ReservedWork(PriorityClass.BATCH.rank, "heavy", 9, 900)) == 0
    assert work_of(ReservedWork(PriorityClass.INTERACTIVE.rank, "heavy", 9, 900)) == 900
    assert work_of(ReservedWork(rank, "light", 1, 50)) == 50
    assert work_of(ReservedWork(rank, "heavy", 9, 900)) == 50


# -- outages of all replicas that could serve a request ---------------------------------------------------

GRACE_S = 5.0


def waiting_when_the_last_replica_dies() -> ManualDriver:
    driver = one_replica()
    fill(driver)
    driver.arrive("waits", expires_at=driver.now + 300.0)
    driver.feed(ReplicaLost("r1"))
    return driver


def test_a_replica_that_joins_within_the_grace_period_serves_the_request() -> None:
    driver = waiting_when_the_last_replica_dies()
    driver.now += GRACE_S - 0.1
    assert dispatched(driver.join("r2", "only")) == [("waits", "r2")]


def test_a_request_that_a_dead_replica_returns_late_is_rejected_too() -> None:
    driver = waiting_when_the_last_replica_dies()
    driver.feed(Woke(), after_s=GRACE_S)
    commands = driver.feed(DispatchFailed("f0", "r1", DispatchFailure.LOST), after_s=1.0)
    assert concluded(commands) == [("f0", "rejected_no_replica")]


def test_a_request_whose_timeout_ends_within_the_grace_reports_the_outage() -> None:
    driver = one_replica()
    driver.feed(ReplicaLost("r1"))
    driver.arrive("r", expires_at=driver.now + 1.0)
    commands = driver.feed(Woke(), after_s=1.0)
    assert concluded(commands) == [("r", "rejected_no_replica")]


def test_a_no_wait_request_is_rejected_immediately() -> None:
    driver = one_replica()
    driver.feed(ReplicaLost("r1"))
    assert concluded(driver.arrive("r", no_wait=True)) == [("r", "rejected_no_replica")]


def test_a_request_that_fits_only_the_dead_pool_is_rejected_and_others_are_served() -> None:
    driver = two_pools()
    driver.feed(ReplicaLost("l1"))
    driver.arrive("long", prompt_tokens=2_000)
    commands = [command for _ in range(12) for command in driver.report("s1", after_s=0.5)]
    rejection = next(command for command in commands if isinstance(command, Conclude))
    assert (rejection.request_id, rejection.conclusion.outcome) == ("long", Outcome.REJECTED_NO_REPLICA)
    assert "m has had no live replica that can serve this request" in rejection.conclusion.message
    assert dispatched(driver.arrive("short", prompt_tokens=20)) == [("short", "s1")]


@pytest.mark.parametrize("spill", [True, False])
def test_a_request_at_home_in_the_dead_pool_spills_or_is_rejected(spill: bool) -> None:
    driver = two_pools(routing=RoutingSettings(b_short_tokens=500, spill=spill))
    driver.feed(ReplicaLost("s1"))
    for _ in range(12):
        driver.report("l1", after_s=0.5)
    commands = driver.arrive("short", prompt_tokens=20)
    assert dispatched(commands) == ([("short", "l1")] if spill else [])
    assert concluded(commands) == ([] if spill else [("short", "rejected_no_replica")])


@pytest.mark.parametrize("reconnections", [0, 5])
def test_retry_after_is_what_earlier_starts_took_less_the_age_of_the_outage(reconnections: int) -> None:
    driver = ManualDriver()
    driver.now = 40.0
    driver.join("s1", "short")
    # A reconnection is no start of an engine.
    for _ in range(reconnections):
        driver.feed(ReplicaLost("s1"))
        driver.now += 0.5
        driver.join("s1", "short")
    driver.feed(ReplicaLost("s1"))
    driver.now += 10.0
    assert retry_after_s(driver.arrive("r")) == pytest.approx(30.0, abs=1.0)


def test_retry_after_of_the_first_start_grows_with_its_age_up_to_the_cap() -> None:
    driver = ManualDriver()
    driver.now = 12.0
    assert retry_after_s(driver.arrive("r1")) == pytest.approx(12.0, abs=1.0)
    driver.now = 400.0
    assert retry_after_s(driver.arrive("r2")) == RETRY_AFTER_CAP_S
