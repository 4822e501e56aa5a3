import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.workloads.lengths import (
    LognormalLengths,
    MixedLengths,
    QuantileLengths,
    UniformLengths,
    pair_within_totals,
)
from serve_app.workloads.streams import stream


def test_quantile_lengths_reproduce_their_points() -> None:
    lengths = QuantileLengths(((0, 1), (0.5, 100), (0.9, 1000), (1, 2000)))
    drawn = lengths.sample(50_000, stream(0, "lengths"))
    assert np.percentile(drawn, [50, 90]) == pytest.approx([100, 1000], rel=0.05)
    assert drawn.min() >= 1
    assert drawn.max() <= 2000


def test_lognormal_lengths_have_the_asked_mean_and_are_cut() -> None:
    drawn = LognormalLengths(mean=100, cv=0.5, max_tokens=400).sample(50_000, stream(0, "lengths"))
    assert drawn.mean() == pytest.approx(100, rel=0.03)
    assert drawn.max() <= 400


def test_mixed_lengths_keep_the_shares_of_their_parts() -> None:
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


def test_pairing_keeps_every_output_when_all_fit() -> None:
    totals, outputs = np.array([9, 100, 50, 10]), np.array([8, 9, 40, 49])
    paired = pair_within_totals(totals, outputs, stream(3, "lengths"))
    assert sorted(paired) == sorted(outputs)


def test_distributions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="from share 0 to share 1"):
        QuantileLengths(((0.1, 1), (1, 2)))
    with pytest.raises(ValueError, match="must ascend"):
        QuantileLengths(((0, 5), (1, 2)))
    with pytest.raises(ValueError, match="got 9 and 3"):
        UniformLengths(9, 3)
    with pytest.raises(ValueError, match=r"add up to 1, got 0\.5"):
        MixedLengths(((0.5, UniformLengths(1, 2)),))
    with pytest.raises(ValueError, match="cv > 0"):
        LognormalLengths(mean=5, cv=0, max_tokens=9)
