import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.lab.reports.plots import by_length, distributions, mean, over_time, p95, without_first_token


def record(arrived_at: float, ttft_s: float, prompt_tokens: int = 100) -> RequestRecord:
    return RequestRecord(
        request_id=f"{arrived_at}",
        arrived_at=arrived_at,
        first_token_at=arrived_at + ttft_s,
        finished_at=arrived_at + ttft_s + 1.0,
        outcome=Outcome.COMPLETED,
        prompt_tokens=prompt_tokens,
        output_tokens=10,
    )


def test_a_distribution_is_the_share_at_most_so_large() -> None:
    curves = distributions({"a": [0.1, 0.2, 0.4, 0.8], "b": [0.05], "none": []})
    for place, share in zip(curves.positions, curves.lines["a"], strict=True):
        assert share == sum(value <= place for value in (0.1, 0.2, 0.4, 0.8)) / 4
    assert curves.positions[-1] == 0.8
    assert curves.lines["b"][0] == 0.0
    assert set(curves.lines["none"]) == {None}


def test_values_of_zero_count_in_a_distribution() -> None:
    curves = distributions({"a": [0.0, 0.0, 1.0, 1.0]})
    assert (curves.lines["a"][0], curves.lines["a"][-1]) == (0.5, 1.0)
    assert distributions({"a": [0.0]}).positions == []


def test_figures_by_length_are_of_the_requests_of_that_length() -> None:
    short = [record(at, 0.1 * at, prompt_tokens=100) for at in range(10)]
    long = [record(at, 5.0, prompt_tokens=3_000) for at in range(50)]
    curves = by_length({"a": short + long, "b": short}, mean)
    first, last = curves.positions
    assert 64 < first < 128
    assert 2_048 < last < 4_096
    assert curves.lines["a"] == pytest.approx([0.45, 5.0])
    assert curves.lines["b"] == [pytest.approx(0.45), None]
    assert by_length({"a": short + long}, p95).lines["a"] == [None, pytest.approx(5.0)]


def test_requests_wait_from_their_arrival_to_their_first_token() -> None:
    curves = without_first_token({"a": [record(0.0, 10.0), record(5.0, 5.0)], "none": []})
    assert curves.lines["a"][10] == pytest.approx(1.0)
    assert curves.lines["a"][150] == pytest.approx(2.0)
    assert set(curves.lines["none"]) == {0.0}
    # No request counts twice: the area under the line is the total wait.
    width = 10.0 / len(curves.positions)
    assert sum(value or 0.0 for value in curves.lines["a"]) * width == pytest.approx(15.0)


def test_figures_over_time_are_of_those_that_arrived_then() -> None:
    records = [record(float(at), 1.0 if at < 50 else 2.0) for at in range(100)]
    curves = over_time({"a": records}, bins=2)
    assert curves.lines["a"] == [1.0, 2.0]
