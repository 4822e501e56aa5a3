import random

import pytest

from serve_app.core.outlook.spread import Margin, Quantiles, RatioSpread, RatioSpreads


def test_quantiles_are_those_of_the_observations() -> None:
    rng, spread = random.Random(1), RatioSpread()
    ratios = [rng.lognormvariate(0.3, 0.6) for _ in range(20_000)]
    for ratio in ratios:
        spread.add(ratio)
    seen, ratios = spread.quantiles(), sorted(ratios[-2_000:])
    for share, found in ((0.1, seen.low), (0.5, seen.middle), (0.9, seen.high)):
        assert found == pytest.approx(ratios[int(share * len(ratios))], rel=0.2)


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 2**-7, 2**-6), (1e9, 2**4, 2**5)])
def test_an_observation_out_of_range_counts_at_its_end(ratio: float, low: float, high: float) -> None:
    spread = RatioSpread()
    spread.add(ratio)
    assert low <= spread.quantiles().middle <= high


def test_older_ratios_decay() -> None:
    spread = RatioSpread()
    for _ in range(5_000):
        spread.add(0.25)
    for _ in range(2_000):
        spread.add(4.0)
    assert spread.quantiles().low == pytest.approx(4.0, rel=0.1)


def test_any_number_of_observations_is_counted() -> None:
    spread = RatioSpread()
    # Weights that are never rescaled overflow after 142,000.
    for _ in range(150_000):
        spread.add(1.0)
    assert spread.quantiles().middle == pytest.approx(1.0, rel=0.1)
    assert spread.count == 150_000


def test_the_most_special_key_with_enough_ratios_applies_and_the_prior_before_any() -> None:
    prior = Quantiles(0.1, 0.2, 0.3)
    spreads = RatioSpreads(prior, least=2)
    spreads.add(1.0, "special", "general")
    assert spreads.quantiles("special", "general") == prior
    spreads.add(4.0, "other", "general")
    general = spreads.quantiles("special", "general")
    assert general == spreads.quantiles("unknown", "general") != prior
    spreads.add(1.0, "special", "general")
    assert spreads.quantiles("special", "general").high < spreads.quantiles("general").high


@pytest.mark.parametrize("centre", [0.2, 1.0, 5.0])
def test_a_margin_makes_an_interval_hold_that_the_spread_alone_does_not(centre: float) -> None:
    rng, margin, inside = random.Random(2), Margin(), 0
    for number in range(4_000):
        interval = Quantiles(0.8 / margin.low, 1.0, 1.25 * margin.high)
        actual = centre * rng.lognormvariate(0.0, 0.2)
        inside += number >= 1_000 and interval.low <= actual <= interval.high
        margin.learn(actual, interval)
    assert 0.8 <= inside / 3_000 <= 0.95


def test_a_margin_never_narrows_the_spread() -> None:
    margin = Margin()
    for _ in range(1_000):
        margin.learn(1.0, Quantiles(0.1, 1.0, 10.0))
    assert (margin.low, margin.high) == (1.0, 1.0)
