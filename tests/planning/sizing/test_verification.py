from dataclasses import replace

import pytest

from serve_app.planning.sizing.fleets import PoolPlan, paged_fleet, split_fleet
from serve_app.planning.sizing.verification import Verifier, at_full_size, stand_in_share
from tests.planning.builders import demand

ONE = paged_fleet(PoolPlan(profile="laptop"))
TWO = split_fleet(PoolPlan(profile="laptop"), PoolPlan(profile="laptop"), 1_024)


def test_a_fleet_is_measured_over_seeds() -> None:
    verifier = Verifier(demand(40.0))
    few, enough = (verifier.measure(ONE, {"all": count}, range(2)) for count in (1, 5))
    assert enough.meets
    assert not few.meets
    assert enough.ttft is not None
    assert few.ttft is not None
    assert enough.ttft.n == 2
    assert enough.ttft.mean < 1.0 < few.ttft.mean
    assert all(run.requests == 400 and not run.lost for run in enough.runs)
    assert enough.as_json()["replicas"] == {"all": 5}


def test_no_run_is_played_twice() -> None:
    verifier = Verifier(demand(40.0))
    first = verifier.measure(ONE, {"all": 4}, [0])
    assert verifier.played == 1
    again = verifier.measure(ONE, {"all": 4}, [0, 1])
    assert verifier.played == 2
    assert again.runs[0] == first.runs[0]
    assert len(verifier.measured) == 2


def test_each_pool_has_figures_of_its_own() -> None:
    verification = Verifier(demand(30.0)).measure(TWO, {"short": 3, "long": 3}, [0])
    short, long = (verification.pool_figures(pool) for pool in ("short", "long"))
    assert short["request_ratio"] is not None
    assert long["request_ratio"] is not None
    assert short["request_ratio"] > 0.5
    assert short["request_ratio"] + long["request_ratio"] == pytest.approx(1.0)
    assert short["p99_ttft_s"] is not None


def test_a_stand_in_has_its_share_of_the_rate_and_numbers_are_scaled_back() -> None:
    assert stand_in_share(200, 25) == 0.125
    assert stand_in_share(10, 25) == 1.0
    assert at_full_size(9, 0.125) == 72
    assert at_full_size(7, 0.3) == 24
    verifier = Verifier(demand(80.0), share=0.5)
    small = verifier.measure(ONE, {"all": 4}, [0])
    assert small.demand.rate_per_s == 40.0
    large = verifier.at_twice_the_size(ONE, {"all": 4}, [0])
    assert large.counts == {"all": 8}
    assert large.demand.rate_per_s == 80.0
    assert large.runs[0].requests == 2 * small.runs[0].requests


def test_shares_and_rates_are_checked() -> None:
    with pytest.raises(ValueError, match="share"):
        Verifier(demand(1.0), share=0.0)
    with pytest.raises(ValueError, match="rate_per_s"):
        demand(0.0)


def test_headroom_is_the_part_of_a_replica_that_is_not_needed() -> None:
    verifier = Verifier(demand(30.0))
    roomy = verifier.headroom(ONE, {"all": 4}, [0])
    assert roomy == pytest.approx(1 + 0.75 / 4)
    assert verifier.headroom(ONE, {"all": 1}, [0]) == 1.0
    assert not verifier.measured
    assert at_full_size(8, 0.1, headroom=1.05) == 77


def test_long_requests_have_figures_of_their_own() -> None:
    wanted = replace(demand(30.0), long_above_tokens=1_000)
    verification = Verifier(wanted).measure(ONE, {"all": 4}, [0])
    assert verification.long_ttft is not None
    assert verification.ttft is not None
    assert verification.long_ttft.mean >= verification.ttft.mean
