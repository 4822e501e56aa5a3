"""Statistics of a comparison, on drawn latencies with a known difference."""

import random

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.lab.bench.comparison import FEW_SLICES, RecordPair, compare


def record(ttft_s: float, *, completed: bool = True) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        arrived_at=0.0,
        finished_at=ttft_s + 1.0,
        first_token_at=ttft_s,
        outcome=Outcome.COMPLETED if completed else Outcome.FAILED,
        prompt_tokens=10,
        output_tokens=11,
    )


def drawn_pairs(rng: random.Random, factor: float, slices: int = 8, members: int = 30) -> list[RecordPair]:
    """Draw latencies that differ between slices; the other endpoint's are `factor` times the first one's."""
    pairs = []
    for number in range(slices):
        moment = rng.uniform(0.8, 1.2)
        for _ in range(members):
            base, other = (moment * rng.uniform(0.1, 0.3) for _ in range(2))
            pairs.append(RecordPair(number, record(base), record(factor * other)))
    return pairs


@pytest.mark.slow
def test_nineteen_of_twenty_intervals_hold_the_true_difference() -> None:
    rng = random.Random(7)
    held = {"mean": 0, "p50": 0}
    for _ in range(60):
        ttft = compare(drawn_pairs(rng, 1.5)).latencies["ttft_s"]
        for name in held:
            low, high = ttft[name].low, ttft[name].high
            assert low is not None
            assert high is not None
            # Mean and median of a uniform distribution from 0.1 to 0.3 are 0.2.
            held[name] += low <= 0.5 * 0.2 <= high
    assert min(held.values()) >= 51, held


def test_a_clear_difference_is_called_one_and_chance_is_not() -> None:
    slower = compare(drawn_pairs(random.Random(1), 1.5)).latencies["ttft_s"]
    assert all(figure.is_clear and figure.difference > 0 for figure in slower.values())
    alike = compare(drawn_pairs(random.Random(1), 1.0))
    assert not any(figure.is_clear for figure in alike.latencies["ttft_s"].values())
    assert alike.pairs == alike.completed_by_both == 240
    assert alike.latencies["tpot_s"]["mean"].base == pytest.approx(0.1)


def test_effects_of_a_slice_on_both_endpoints_cancel() -> None:
    """A tenfold difference between slices does not hide a difference of 1 % between endpoints."""
    pairs = [
        RecordPair(
            number,
            record(0.1 * (number + 1) + 0.001 * place),
            record(0.1 * (number + 1) + 0.011 + 0.001 * place),
        )
        for number in range(10)
        for place in range(5)
    ]
    mean = compare(pairs).latencies["ttft_s"]["mean"]
    assert mean.low == pytest.approx(0.011)
    assert mean.high == pytest.approx(0.011)
    assert mean.is_clear


def test_latencies_are_of_requests_that_both_completed_and_errors_of_all() -> None:
    pairs = [
        RecordPair(number, record(0.1), record(0.1, completed=number % 2 == 0))
        for number in range(FEW_SLICES)
    ]
    found = compare(pairs)
    assert (found.pairs, found.completed_by_both, found.slices) == (6, 3, 6)
    assert found.latencies["ttft_s"]["mean"].n == 3
    assert (found.errors.base, found.errors.other) == (0.0, 0.5)
    assert found.as_json()["errors"] == found.errors.as_json()


def test_one_slice_has_no_interval_and_none_no_comparison() -> None:
    one = compare([RecordPair(0, record(0.1), record(0.2))]).latencies["ttft_s"]["p99"]
    assert (one.low, one.high, one.is_clear) == (None, None, False)
    nothing = compare([RecordPair(0, record(0.1), record(0.2, completed=False))])
    assert nothing.latencies == {}
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([])
