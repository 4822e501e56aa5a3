from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from experiments.common.drifting_mix import (
    MixPoints,
    MixRates,
    drifting_arrivals,
    long_share,
    mix_rates,
    trace_of_kinds,
)
from serve_app.lab.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.lab.workloads.generators import stream

FLIP: MixPoints = ((0, 0.1), (0.5, 0.1), (0.5, 0.6), (1, 0.6))
DRIFT: MixPoints = ((0, 0.1), (1, 0.6))
RATES = MixRates(low=0.1, high=0.6, low_s=0.1, high_s=0.4)


def lengths(kinds: Sequence[bool], _seed: int) -> Iterator[tuple[int, int]]:
    return ((2_000 if is_long else 100, 50) for is_long in kinds)


@pytest.mark.parametrize(
    ("points", "when", "share"),
    [(FLIP, 0.49, 0.1), (FLIP, 0.51, 0.6), (FLIP, 1.0, 0.6), (DRIFT, 0.5, 0.35), (DRIFT, 0.0, 0.1)],
)
def test_the_mix_changes_along_straight_lines(points: MixPoints, when: float, share: float) -> None:
    assert long_share(points, when) == pytest.approx(share)


def test_the_rate_falls_where_requests_are_long_so_that_the_load_stays() -> None:
    arrivals = drifting_arrivals(FLIP, RATES, 0.5, 4_000.0, stream(1, "arrivals"))
    first = [is_long for at, is_long in arrivals if at < 2_000]
    second = [is_long for at, is_long in arrivals if at >= 2_000]
    assert len(first) / 2_000 == pytest.approx(0.5 / 0.1, rel=0.05)
    assert len(second) / 2_000 == pytest.approx(0.5 / 0.4, rel=0.08)
    assert sum(first) / len(first) == pytest.approx(0.1, abs=0.02)
    assert sum(second) / len(second) == pytest.approx(0.6, abs=0.04)
    assert all(one < other for (one, _), (other, _) in pairwise(arrivals))


def test_a_steady_mix_has_one_rate() -> None:
    steady = MixRates(low=0.2, high=0.2, low_s=0.3, high_s=0.3)
    assert steady.seconds(0.2) == 0.3


def test_a_longer_mix_takes_more_of_the_fleet() -> None:
    rates = mix_rates(DRIFT, lengths, FleetSettings(profile="laptop", replicas={ONE_POOL: 1}))
    assert (rates.low, rates.high) == (0.1, 0.6)
    assert 0 < rates.low_s < rates.high_s


def test_lengths_follow_the_kind_of_each_arrival() -> None:
    trace = trace_of_kinds("two", [(0.0, True), (1.5, False)], lengths, 0)
    assert [(one.arrival_s, one.prompt_tokens) for one in trace.requests] == [(0.0, 2_000), (1.5, 100)]
