import random

import pytest

from serve_app.core.isolation import FeedbackDelay, IsolationSettings, PrefillIsolation
from serve_app.core.routing.replica_state import PrefillClass


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
