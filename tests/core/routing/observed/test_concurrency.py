import pytest

from serve_app.core.routing.observed import ConcurrencyLimit


class Engine:
    """Engine with given answer times, whose limit is always reached."""

    def __init__(self) -> None:
        self.limit = ConcurrencyLimit()
        self.now = 0.0

    def answer(self, seconds: float, *, times: int = 1, tokens: int = 500, in_flight: int = 0) -> float:
        for _ in range(times):
            self.now += 10.0 + seconds
            sent = in_flight or int(self.limit.limit)
            self.limit.observe(tokens, seconds, self.now, in_flight=sent)
        return self.limit.limit


def test_the_first_late_answer_ends_the_fast_growth() -> None:
    engine = Engine()
    assert engine.answer(1.0, times=10) == 18.0
    # 2 x 1 s + 0.25 s are not exceeded.
    assert engine.answer(2.25) == 19.0
    assert engine.answer(2.3) == 0.9 * 19
    assert engine.answer(1.0) == pytest.approx(0.9 * 19 * (1 + 1 / 160))
    engine.limit.limit = 2.0
    assert engine.answer(1.0) == 2.05


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    assert Engine().answer(1.0, times=10, in_flight=5) == 8.0


def test_a_small_limit_is_in_use_when_no_other_request_fits() -> None:
    # Of 3.8 only three can be in flight, which is below 80 %.
    engine = Engine()
    engine.limit.limit = 3.8
    assert engine.answer(1.0) > 3.8


def test_late_answers_that_were_sent_together_count_once() -> None:
    limit = ConcurrencyLimit()
    for _ in range(4):
        limit.observe(500, 1.0, 10.0, in_flight=1)
    for _ in range(5):
        # All were dispatched at 10 s.
        limit.observe(500, 10.0, 20.0, in_flight=10)
    assert limit.limit == 0.9 * 8


def test_the_limit_follows_what_is_in_flight_and_never_ends_below_one() -> None:
    engine = Engine()
    engine.answer(1.0, times=8, in_flight=1)
    assert engine.answer(9.0, in_flight=5) == 4.5
    # Each answer takes longer than the usual time, which rises.
    for power in range(1, 12):
        engine.answer(9.0 * 4**power, in_flight=1)
    assert engine.limit.limit == 1.0


def test_a_long_prompt_is_not_late_beside_short_ones() -> None:
    engine = Engine()
    engine.answer(0.1, times=8, tokens=100)
    before = engine.limit.limit
    assert engine.answer(8.0, tokens=30_000) > before


def test_an_engine_that_became_slower_is_usual_after_a_while() -> None:
    engine = Engine()
    engine.answer(1.0, times=40)
    engine.answer(5.0, times=40)
    lowest = engine.limit.limit
    assert engine.answer(5.0, times=40) > lowest


def test_non_streamed_answers_are_compared_with_each_other() -> None:
    limit = ConcurrencyLimit()
    for at in range(8):
        limit.observe(500, 0.1, 10.0 * at, in_flight=10, streamed=True)
    before = limit.limit
    for at in range(8, 12):
        limit.observe(500, 30.0, 10.0 * at, in_flight=20, streamed=False)
    assert limit.limit > before
