"""Error bars from synthetic residuals with a known right answer."""

import random

import pytest

from serve_app.request import PriorityClass
from serve_app.tuning.counterfactuals.what_if import ErrorBars, Residual

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE


def residual(name: str, replayed_s: float, error_s: float, priority: PriorityClass = BATCH) -> Residual:
    return Residual(name, priority, replayed_s, replayed_s + error_s)


def others(count: int, seed: int = 0, sd_s: float = 0.5) -> list[Residual]:
    rng = random.Random(seed)
    return [residual(f"r{n}", rng.uniform(0.0, 20.0), rng.gauss(0.0, sd_s)) for n in range(count)]


def test_a_change_without_effect_gives_the_recorded_wait() -> None:
    estimate = ErrorBars(others(60), residual("own", 10.0, 0.4)).estimate(10.0, BATCH)

    assert estimate.seconds == pytest.approx(10.4)
    assert estimate.low_s < 10.4 < estimate.high_s


def test_the_own_error_is_carried_as_far_as_the_waits_are_alike() -> None:
    bars = ErrorBars(others(60), residual("own", 10.0, 0.4))

    assert bars.estimate(5.0, BATCH).seconds == pytest.approx(5.2)
    assert bars.estimate(0.0, BATCH).seconds == 0.0
    assert bars.estimate(20.0, BATCH).seconds == pytest.approx(20.2)


@pytest.mark.parametrize("share_left", [0.1, 0.5, 1.0])
def test_nine_in_ten_fall_within_the_bar(share_left: float) -> None:
    """Holds for errors that are independent and equally large before and after the change."""
    rng, inside, count = random.Random(3), 0, 400
    for number in range(count):
        bars = ErrorBars(others(150, number), residual("own", 12.0, rng.gauss(0.0, 0.5)))
        estimate = bars.estimate(12.0 * share_left, BATCH)
        really = 12.0 * share_left + rng.gauss(0.0, 0.5)
        inside += estimate.low_s <= really <= estimate.high_s
    assert 0.84 < inside / count < 0.97


def test_the_bar_is_that_of_the_class_and_the_wait_after_the_change() -> None:
    exact = [residual(f"i{n}", n / 10, 0.01, INTERACTIVE) for n in range(40)]
    rough = [residual(f"b{n}", 10.0 + n / 10, 3.0 * (-1) ** n) for n in range(40)]
    bars = ErrorBars([*exact, *rough], residual("own", 12.0, 0.1))

    as_interactive, as_batch = bars.estimate(0.5, INTERACTIVE), bars.estimate(11.0, BATCH)

    assert as_interactive.high_s - as_interactive.low_s < 0.5
    assert as_batch.high_s - as_batch.low_s > 5.0


def test_a_replay_that_misses_the_wait_itself_is_reported_and_wider() -> None:
    well = ErrorBars(others(60, sd_s=0.2), residual("own", 10.0, 0.1))
    badly = ErrorBars(others(60, sd_s=0.2), residual("own", 10.0, 6.0))

    assert well.reproduces
    assert not badly.reproduces
    estimate = badly.estimate(1.0, BATCH)
    assert estimate.seconds == 1.0
    assert estimate.high_s - estimate.seconds >= 6.0
