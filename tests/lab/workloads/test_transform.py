import pytest

from serve_app.lab.workloads import Trace, TraceError, merge, scale_to_rate, stream, take
from tests.lab.workloads.builders import trace


def test_a_cut_starts_at_zero_and_preserves_the_gaps() -> None:
    cut = take(trace(0, 1, 3, 7, 15, 31), 3, stream(5, "window"))
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(cut.requests, cut.requests[1:], strict=False)]
    assert cut.requests[0].arrival_s == 0
    assert gaps in ([1, 2], [2, 4], [4, 8], [8, 16])
    assert "requests" in cut.source


def test_without_a_random_position_the_cut_is_the_beginning() -> None:
    assert [one.prompt_tokens for one in take(trace(0, 1, 2, 3), 2).requests] == [1, 2]
    whole = trace(0, 1)
    assert take(whole, 2) is whole


def test_a_short_trace_is_repeated_with_a_mean_gap_between_repetitions() -> None:
    repeated = take(trace(0, 1, 2), 7)
    assert [one.arrival_s for one in repeated.requests] == [0, 1, 2, 3, 4, 5, 6]
    assert [one.prompt_tokens for one in repeated.requests] == [1, 2, 3, 1, 2, 3, 1]
    assert "repeated to 7 requests" in repeated.source
    assert [one.arrival_s for one in take(trace(0), 3).requests] == [0, 1, 2]


def test_merging_orders_by_arrival_and_names_the_parts() -> None:
    merged = merge([trace(0, 4, name="a"), trace(1, 4, name="b")], name="both")
    assert [(one.arrival_s, one.prompt_tokens) for one in merged.requests] == [(0, 1), (1, 1), (4, 2), (4, 2)]
    assert merged.source.startswith("merged: ")


def test_scaling_changes_the_mean_rate_and_preserves_the_pattern() -> None:
    scaled = scale_to_rate(trace(0, 1, 4), 3.0)
    assert scaled.rate_per_s == pytest.approx(3.0)
    assert [one.arrival_s for one in scaled.requests] == pytest.approx([0, 1 / 6, 4 / 6])


def test_impossible_changes_are_rejected_with_the_value() -> None:
    with pytest.raises(TraceError, match="rate must be positive, got 0"):
        scale_to_rate(trace(0, 1), 0)
    with pytest.raises(TraceError, match="all 2 requests of 't' arrive at once"):
        scale_to_rate(trace(1, 1), 5)
    with pytest.raises(TraceError, match="at least one request, got 0"):
        take(trace(0), 0)
    with pytest.raises(TraceError, match="has no request"):
        Trace(name="none", source="nowhere", requests=())
