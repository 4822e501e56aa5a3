"""Damping of endpoints that appear and disappear."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.serving.remote.endpoint import FlapDamping


def test_the_first_failure_costs_a_second_and_each_further_one_twice_as_much() -> None:
    damping, now, holds = FlapDamping(), 0.0, []
    for _ in range(9):
        while damping.on_answer(now):
            now += 0.5
        damping.on_failure(now)
        holds.append(damping.on_answer(now))
    assert holds == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_new_endpoint_is_not_held_back() -> None:
    damping = FlapDamping()
    damping.on_failure(0.0)
    assert damping.on_answer(1.0) == 0


def test_one_that_has_served_for_a_minute_has_settled() -> None:
    damping = FlapDamping()
    damping.on_answer(0.0)
    damping.on_failure(1.0)
    assert damping.on_answer(2.0) == 1.0
    assert damping.on_answer(3.0) == 0
    damping.on_failure(63.0)
    assert damping.on_answer(64.0) == 0


def test_a_failure_during_the_hold_restarts_it() -> None:
    damping = FlapDamping()
    damping.on_answer(0.0)
    damping.on_failure(1.0)
    assert damping.on_answer(2.0) == 1.0
    damping.on_failure(2.5)
    assert damping.on_answer(3.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50))
def test_it_serves_only_after_its_hold_without_a_failure(steps: list[tuple[float, bool]]) -> None:
    damping, now, answers_since, hold_s = FlapDamping(), 0.0, None, 0.0
    for pause_s, answers in steps:
        now += pause_s
        if not answers:
            damping.on_failure(now)
            answers_since = None
            continue
        left_s = damping.on_answer(now)
        if answers_since is None:
            answers_since, hold_s = now, left_s
        assert 0 <= left_s <= hold_s <= 60
        if left_s == 0:
            assert now >= answers_since + hold_s - 1e-6
