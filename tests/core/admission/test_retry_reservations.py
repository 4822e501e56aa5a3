import itertools
import math

import pytest

from serve_app.core.admission.admission import (
    QueueLimit,
    ReservedWork,
    RetryReservations,
    fair_work,
)
from serve_app.request import PriorityClass
from tests.builders import request

NOTHING_AHEAD = QueueLimit(level=0.0, drain_per_s=10.0, limit=50.0)


@pytest.fixture
def reservations() -> RetryReservations:
    return RetryReservations()


def tokens(reserved: ReservedWork) -> float:
    return float(reserved.tokens)


def test_a_limit_allows_a_request_when_the_queue_has_drained_to_it(reservations: RetryReservations) -> None:
    assert (
        reservations.admissible_in_s(QueueLimit(level=50.0, drain_per_s=10.0, limit=50.0), tokens, 0.0) == 0.0
    )
    assert (
        reservations.admissible_in_s(QueueLimit(level=90.0, drain_per_s=10.0, limit=50.0), tokens, 0.0) == 4.0
    )
    assert (
        reservations.admissible_in_s(QueueLimit(level=90.0, drain_per_s=0.0, limit=50.0), tokens, 0.0)
        == math.inf
    )


def test_requests_rejected_later_get_a_later_retry_after(reservations: RetryReservations) -> None:
    queue, delays_s = QueueLimit(level=90.0, drain_per_s=10.0, limit=50.0), []
    for number in range(5):
        delays_s.append(reservations.admissible_in_s(queue, tokens, 0.0))
        reservations.reserve(request(f"r{number}", prompt_tokens=number + 1), 20, delays_s[-1], 0.0)
    assert delays_s == sorted(delays_s)
    assert all(later - earlier >= 2.0 for earlier, later in itertools.pairwise(delays_s[1:]))


def test_a_newcomer_takes_only_capacity_that_is_free_before_the_reserved_work_is_due(
    reservations: RetryReservations,
) -> None:
    reservations.reserve(request(prompt_tokens=1), 60, 20.0, 0.0)
    assert (
        reservations.admissible_in_s(QueueLimit(level=45.0, drain_per_s=10.0, limit=80.0), tokens, 0.0) == 0.0
    )
    assert (
        reservations.admissible_in_s(QueueLimit(level=45.0, drain_per_s=1.0, limit=80.0), tokens, 0.0) > 20.0
    )


def test_a_returning_request_claims_its_reservation_once(reservations: RetryReservations) -> None:
    reservations.reserve(request("first", prompt_tokens=70), 80, 10.0, 0.0)
    assert not reservations.claim(request("early", prompt_tokens=70), 5.0)
    assert not reservations.claim(request("another length", prompt_tokens=71), 10.0)
    assert not reservations.claim(request("another tenant", prompt_tokens=70, tenant="t2"), 10.0)
    assert reservations.claim(request("second", prompt_tokens=70), 10.0)
    assert not reservations.claim(request("third", prompt_tokens=70), 10.0)
    assert len(reservations) == 0
    assert reservations.admissible_in_s(NOTHING_AHEAD, tokens, 10.0) == 0.0


def test_of_equal_requests_the_earliest_reservation_is_claimed(reservations: RetryReservations) -> None:
    for due_at in (8.0, 3.0, 40.0):
        reservations.reserve(request(), 10, due_at, 0.0)
    assert [reservations.claim(request(), 10.0) for _ in range(3)] == [True, True, False]
    assert len(reservations) == 1


def test_the_requests_of_one_burst_do_not_claim_the_reservations_of_each_other(
    reservations: RetryReservations,
) -> None:
    """The requests are alike, and the first one's `Retry-After` is within the tolerance for early returns."""
    queue, delays_s = QueueLimit(level=50.5, drain_per_s=10.0, limit=50.0), []
    for _ in range(5):
        assert not reservations.claim(request(), 0.0)
        delays_s.append(reservations.admissible_in_s(queue, tokens, 0.0))
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
    assert (
        reservations.admissible_in_s(QueueLimit(level=0.0, drain_per_s=10.0, limit=200.0), tokens, 5.0) == 0.0
    )


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
