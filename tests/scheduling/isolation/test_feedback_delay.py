import random

import pytest

from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.isolation.feedback_delay import FeedbackDelay
from serve_app.scheduling.isolation.prefill_isolation import IsolationSettings, PrefillIsolation


def told(lag_s: float, *, long_s: float, count: int = 200, seed: int = 0) -> FeedbackDelay:
    """Of a fleet whose news is so late; short requests wait for up to half a second besides."""
    rng, lag = random.Random(seed), FeedbackDelay()
    for _ in range(count):
        lag.on_short_first_token(lag_s + rng.uniform(0.0, 0.5))
        lag.on_long_first_token(lag_s + long_s)
    return lag


def test_the_lag_is_the_least_of_what_was_seen_lately_and_follows_it_both_ways() -> None:
    lag = told(0.4, long_s=0.4)
    assert lag.seconds == pytest.approx(0.4, abs=0.05)
    for _ in range(64):
        lag.on_short_first_token(0.7)
    assert lag.seconds == 0.7
    lag.on_short_first_token(0.2)
    assert lag.seconds == 0.2


@pytest.mark.parametrize("seed", range(5))
def test_the_least_is_kept_exactly(seed: int) -> None:
    rng, lag, seen = random.Random(seed), FeedbackDelay(), []
    for _ in range(500):
        seen.append(rng.choice([rng.uniform(-0.1, 1.0), 0.3]))
        lag.on_short_first_token(seen[-1])
        assert lag.seconds == (max(0.0, min(seen[-64:])) if len(seen) >= 16 else 0.0)


def test_limits_grow_by_the_share_of_the_time_that_news_takes() -> None:
    assert told(0.4, long_s=0.4).limit_factor(0.0) == pytest.approx(2.0, rel=0.1)
    assert told(0.4, long_s=4.0).limit_factor(0.0) == pytest.approx(1.1, rel=0.1)
    assert told(0.01, long_s=0.4).limit_factor(0.05) == 1.0
    assert FeedbackDelay().limit_factor(0.0) == 1.0
    # Whatever clocks say, no limit grows beyond all bounds.
    assert told(5.0, long_s=-4.9).limit_factor(0.0) <= 10.0


def test_late_news_lets_more_long_prefills_into_flight_and_fresh_news_none() -> None:
    settings = IsolationSettings(max_long_prefills=2, max_longest_prefills=1, no_short_s=1e6)
    for lag_s, limits in ((0.01, (2, 1)), (0.45, (4, 2))):
        lag = told(lag_s, long_s=0.4)
        isolation = PrefillIsolation(settings, lag, wanted=True)
        assert isolation.limits(PrefillClass.LONGEST, 0.0, 0.0) == limits
        assert isolation.limits(PrefillClass.SHORT, 0.0, 0.0) == ()
