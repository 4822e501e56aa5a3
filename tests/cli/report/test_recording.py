"""The window of a report, and its figures."""

from typing import Any

import pytest

from serve_app.cli.report import command
from serve_app.cli.report.command import ReportError, figures, groups_of, observed, recording_of


def line(arrived_at: float, **changes: Any) -> dict[str, Any]:
    return {
        "input_length": 100,
        "output_length": 11,
        "tenant": "t",
        "priority": "default",
        "arrived_at": arrived_at,
        "outcome": "completed",
        "pool": "p",
        "replica": "r",
        "cached_length": 25,
        "queue_s": 0.5,
        "ttft_s": 1.0,
        "total_s": 2.0,
        "causes_s": {"engines_busy": 0.5},
        **changes,
    }


def arrivals(found: command.Recording) -> list[float]:
    return [record.arrived_at for record in found.records]


def test_the_window_begins_at_the_last_change_of_the_mode() -> None:
    lines = [line(float(at)) for at in range(600)]
    assert arrivals(recording_of(lines, 10, since=590.0)) == [float(at) for at in range(590, 600)]
    assert arrivals(recording_of(lines, 1, since=0.0))[0] == 541.0


def test_the_window_ends_at_the_oldest_open_request() -> None:
    # Of later arrivals only those that were served quickly have ended.
    lines = [line(1.0), line(2.0), line(3.0, outcome=None, total_s=None, ttft_s=None), line(4.0)]
    found = recording_of(lines, 10, since=0.0)
    assert arrivals(found) == [1.0, 2.0]
    assert found.until == 3.0


def test_a_full_history_begins_with_its_first_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_ENDED", 3)
    lines = [line(1.0, total_s=30.0), line(20.0), line(25.0)]
    assert arrivals(recording_of(lines, 10, since=0.0)) == [25.0]


def test_a_window_in_which_nothing_ended_is_rejected() -> None:
    with pytest.raises(ReportError, match="wait some minutes"):
        recording_of([line(1.0, outcome=None, total_s=None)], 10, since=0.0)


def test_times_of_a_record_are_those_of_its_line() -> None:
    (record,) = recording_of([line(5.0)], 10, since=0.0).records
    assert (record.queue_wait_s, record.ttft_s, record.e2e_s, record.tpot_s) == (0.5, 1.0, 2.0, 0.1)


def test_groups_are_lengths_and_what_there_are_several_of() -> None:
    lines = [line(0.0), line(1.0, tenant="u", priority="batch", input_length=101)]
    records = recording_of(lines, 10, since=0.0).records
    groups = groups_of(records, short_at=100)
    assert list(groups) == [
        *("short", "long", "priority batch", "priority default"),
        *("tenant u", "tenant t"),
    ]
    assert [sum(map(selects, records)) for selects in groups.values()] == [1, 0, 1, 1, 1, 1]
    assert list(groups_of(records[:1], short_at=100)) == ["short", "long"]
    assert list(groups_of(records[1:], short_at=100)) == ["short", "long", "priority batch"]


def test_requests_that_did_not_complete_have_no_latencies() -> None:
    lines = [line(0.0), line(1.0, outcome="cancelled", ttft_s=50.0, total_s=60.0), line(2.0, ttft_s=None)]
    found = figures(recording_of(lines, 10, since=0.0).records)
    assert (found["requests"], found["ttft_mean_s"], found["ttft_p99_s"]) == (3, 1.0, 1.0)
    assert found["not_completed_ratio"] == pytest.approx(1 / 3)


def test_outcomes_cache_hits_and_causes_of_waits_are_summed() -> None:
    lines = [line(0.0), line(60.0, outcome="failed", priority="batch", cached_length=0), line(61.0)]
    lines.append(line(62.0, input_length=900, cached_length=0, causes_s={"long_prefill": 9.0}))
    found = observed(recording_of(lines, 10, since=0.0), short_at=100)
    assert found["outcomes"] == {"default completed": 3, "batch failed": 1}
    assert found["cached_ratio"] == pytest.approx(50 / 1_100)
    # Batch work is no short prompt.
    assert found["short_queue_causes_s"] == {"engines_busy": 1.0}
    assert found["requests_per_s"] == pytest.approx(4 / 64)
