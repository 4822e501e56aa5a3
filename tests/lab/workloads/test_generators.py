from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.lab.workloads import (
    Arrivals,
    GammaArrivals,
    LognormalLengths,
    MixedLengths,
    OnOffArrivals,
    QuantileLengths,
    TraceError,
    UniformLengths,
    assign_priorities,
    assign_tenants,
    pair_within_totals,
    parse_shares,
    plain_stream,
    stream,
    zipf_shares,
)
from tests.lab.workloads.builders import trace


def test_quantile_lengths_reproduce_their_points() -> None:
    lengths = QuantileLengths(((0, 1), (0.5, 100), (0.9, 1000), (1, 2000)))
    drawn = lengths.sample(50_000, stream(0, "lengths"))
    assert np.percentile(drawn, [50, 90]) == pytest.approx([100, 1000], rel=0.05)
    assert drawn.min() >= 1
    assert drawn.max() <= 2000


def test_lognormal_lengths_have_the_requested_mean_and_are_cut() -> None:
    drawn = LognormalLengths(mean=100, cv=0.5, max_tokens=400).sample(50_000, stream(0, "lengths"))
    assert drawn.mean() == pytest.approx(100, rel=0.03)
    assert drawn.max() <= 400


def test_mixed_lengths_have_the_shares_of_their_parts() -> None:
    mix = MixedLengths(((0.8, UniformLengths(32, 256)), (0.2, UniformLengths(1024, 4096))))
    drawn = mix.sample(50_000, stream(0, "lengths"))
    assert (drawn <= 256).mean() == pytest.approx(0.8, abs=0.01)
    assert not ((drawn > 256) & (drawn < 1024)).any()


@given(
    st.lists(st.tuples(st.integers(2, 500), st.integers(1, 500)), min_size=1, max_size=80), st.integers(0, 99)
)
def test_an_output_is_always_shorter_than_its_total(pairs: list[tuple[int, int]], seed: int) -> None:
    totals = np.array([total for total, _ in pairs])
    outputs = np.array([output for _, output in pairs])
    paired = pair_within_totals(totals, outputs, stream(seed, "lengths"))
    assert np.all(paired < totals)
    assert np.all(paired >= 1)


def test_pairing_preserves_every_output_when_all_fit() -> None:
    totals, outputs = np.array([9, 100, 50, 10]), np.array([8, 9, 40, 49])
    paired = pair_within_totals(totals, outputs, stream(3, "lengths"))
    assert sorted(paired) == sorted(outputs)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.5])
def test_gamma_gaps_have_the_requested_mean_and_variation(cv: float) -> None:
    times = GammaArrivals(rate_per_s=20, cv=cv).sample(100_000, stream(1, "arrivals"))
    gaps = np.diff(times)
    assert 1 / gaps.mean() == pytest.approx(20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_on_off_arrivals_have_the_mean_rate_and_pauses() -> None:
    times = OnOffArrivals(rate_per_s=5, on_s=10, off_s=10).sample(50_000, stream(2, "arrivals"))
    assert len(times) / times[-1] == pytest.approx(5, rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() > 5
    busy = gaps[gaps < 1]
    assert 1 / busy.mean() == pytest.approx(10, rel=0.1)


@given(st.integers(0, 200), st.integers(0, 1000))
def test_arrivals_ascend_whatever_the_count_and_the_seed(count: int, seed: int) -> None:
    processes: list[Arrivals] = [
        GammaArrivals(rate_per_s=3, cv=2),
        OnOffArrivals(rate_per_s=3, on_s=1, off_s=2),
    ]
    for process in processes:
        times = process.sample(count, stream(seed, "arrivals"))
        assert len(times) == count
        assert np.all(np.diff(times) >= 0)


def test_a_rate_of_zero_is_rejected_with_its_value() -> None:
    with pytest.raises(ValueError, match="rate_per_s must be positive, got 0"):
        GammaArrivals(rate_per_s=0)
    with pytest.raises(ValueError, match="off_s must be positive, got -1"):
        OnOffArrivals(rate_per_s=1, on_s=1, off_s=-1)


def test_zipf_shares_add_up_and_fall_with_the_rank() -> None:
    shares = list(zipf_shares(10).values())
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.34, abs=0.01)
    assert zipf_shares(2, 0) == {"tenant-1": 0.5, "tenant-2": 0.5}


def test_shares_are_read_by_count_by_exponent_and_by_name() -> None:
    assert parse_shares("3") == zipf_shares(3)
    assert parse_shares("3:2") == zipf_shares(3, 2)
    assert parse_shares("search=3, chat=1") == {"search": 0.75, "chat": 0.25}


@pytest.mark.parametrize("text", ["", "many", "3:x", "a=", "a=-1", "=3", "a=nan", "0", "2:-1"])
def test_shares_that_cannot_be_read_are_rejected_with_the_text(text: str) -> None:
    with pytest.raises(TraceError, match=r"shares|tenants"):
        parse_shares(text)


def test_tenants_get_about_their_share_and_nothing_else_changes() -> None:
    plain = trace(*[float(at) for at in range(4000)])
    tenanted = assign_tenants(plain, parse_shares("a=3,b=1"), stream(0, "tenants"))
    counts = Counter(request.tenant for request in tenanted.requests)
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)
    assert [one.arrival_s for one in tenanted.requests] == [one.arrival_s for one in plain.requests]


def test_priorities_are_drawn_by_share_and_unknown_classes_rejected() -> None:
    drawn = assign_priorities(trace(*[0.0] * 50), {"batch": 1.0}, stream(0, "priorities"))
    assert {request.priority for request in drawn.requests} == {"batch"}
    with pytest.raises(TraceError, match="no priority class urgent: use interactive, default, batch"):
        assign_priorities(drawn, {"urgent": 1.0}, stream(0, "priorities"))


def test_streams_are_reproducible_and_reject_a_negative_seed() -> None:
    assert plain_stream(3, "x").random() == plain_stream(3, "x").random()
    assert plain_stream(3, "x").random() != plain_stream(3, "y").random()
    with pytest.raises(ValueError, match="got -1"):
        stream(-1, "x")
