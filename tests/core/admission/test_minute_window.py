"""Window of a per-minute limit: exact for every minute, for any arrivals."""

import math

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.admission.key_limits import MinuteWindow

LIMIT = 10
pauses = st.lists(
    st.tuples(st.floats(0, 25, allow_nan=False), st.integers(1, LIMIT)), min_size=1, max_size=60
)


def test_after_an_idle_minute_the_whole_limit_may_be_used_at_once() -> None:
    window = MinuteWindow()
    for _ in range(LIMIT):
        assert window.admits_in_s(1, LIMIT, 100.0) == 0
        window.add(100.0, 1, 100.0)
    assert window.admits_in_s(1, LIMIT, 100.0) == 61.0
    assert window.admits_in_s(1, LIMIT, 160.5) == 0.5
    assert window.admits_in_s(1, LIMIT, 161.0) == 0
    assert window.status(LIMIT, 161.0).remaining == LIMIT


def test_capacity_returns_in_the_order_of_use() -> None:
    window = MinuteWindow()
    window.add(0.0, 4, 0.0)
    window.add(30.0, 6, 30.0)
    assert window.admits_in_s(4, LIMIT, 30.0) == 31.0
    assert window.admits_in_s(5, LIMIT, 30.0) == 61.0
    assert window.admits_in_s(LIMIT + 1, LIMIT, 30.0) == math.inf
    status = window.status(LIMIT, 61.0)
    assert (status.remaining, status.reset_s) == (4, 30.0)


def test_a_refund_may_be_used_again_and_changes_nothing_older() -> None:
    window = MinuteWindow()
    window.add(0.0, 6, 0.0)
    window.subtract(0.0, 2)
    assert window.used == 4
    window.expire(61.0)
    window.subtract(0.0, 4)
    assert window.used == 0


def test_an_amount_older_than_a_minute_is_not_counted() -> None:
    window = MinuteWindow()
    window.add(10.0, 3, 75.0)
    window.add(20.0, 3, 75.0)
    assert window.used == 3


@given(pauses)
def test_no_minute_ever_admits_more_than_the_limit_and_no_rejection_is_longer_than_needed(
    steps: list[tuple[float, int]],
) -> None:
    window = MinuteWindow()
    now = 0.0
    admitted: list[tuple[float, int]] = []
    for pause_s, amount in steps:
        now += pause_s
        wait_s = window.admits_in_s(amount, LIMIT, now)
        if wait_s:
            now += wait_s
            # A sum of floats may be one ulp too small.
            rest_s = window.admits_in_s(amount, LIMIT, now)
            assert rest_s < 1e-9
            now += rest_s
        admitted.append((now, amount))
        window.add(now, amount, now)
        for end, _ in admitted:
            assert sum(some for at, some in admitted if end - 60 < at <= end) <= LIMIT
