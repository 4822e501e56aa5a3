"""Reports: the window and its figures, the page, and the twin."""

import random
from typing import Any

import pytest

from serve_app.cli.report import command
from serve_app.cli.report.command import (
    MAX_ERROR_RATIO,
    Forecast,
    ReportError,
    figures,
    groups_of,
    observed,
    recording_of,
)
from serve_app.cli.report.page import as_text
from serve_app.core.accounting.wait_causes import WaitCause
from tests.cli.report.application import LONG_TOKENS, REPLICAS, SETTINGS, served


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


# -- page: names of causes, batch work, and the verdict of a comparison -----------------------------------


def window(short_ttft_s: float, long_ttft_s: float, **changes: Any) -> list[dict[str, Any]]:
    """Return 200 short and 200 long prompts with random times around two means."""
    rng = random.Random(7)
    return [
        line(
            float(at),
            input_length=1_000 if at % 2 else 100,
            ttft_s=(long_ttft_s if at % 2 else short_ttft_s) * rng.uniform(0.5, 1.5),
            total_s=20.0,
            **changes,
        )
        for at in range(400)
    ]


def page(lines: list[dict[str, Any]], earlier: list[dict[str, Any]] | None = None) -> str:
    """Return the text of a report, compared with an earlier one."""
    document: dict[str, Any] = {
        "model": "m",
        "created": 0.0,
        "active_share": 1.0,
        "policy": "ewsjf",
        "short_at_tokens": 500,
        "observed": observed(recording_of(lines, 10, 0.0), 500),
        "short_waits": {},
        "forecast": None,
        "earlier": None,
    }
    if earlier is not None:
        before = observed(recording_of(earlier, 10, 0.0), 500)
        document["earlier"] = {**document, "observed": before}
    return as_text(document)


def verdicts(lines: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[str]:
    """Return the last lines of a comparison: one for each length."""
    return page(lines, earlier).replace("\n  ", " ").splitlines()[-2:]


def test_a_comparison_ends_with_a_verdict_for_each_length() -> None:
    short, long = verdicts(window(1.0, 4.0), earlier=window(2.0, 2.0))
    assert short.startswith("Short prompts: better, with a change of -")
    assert long.startswith("Long prompts: worse, with a change of +")


def test_a_change_within_its_interval_is_not_clear() -> None:
    short, long = verdicts(window(1.02, 2.0), earlier=window(1.0, 2.0))
    assert short.startswith("Short prompts: not clear, with a change of +0.019 (-")
    assert long.startswith("Long prompts: not clear")


def test_fast_answers_do_not_outweigh_requests_that_did_not_complete() -> None:
    rejected = [
        {**each, "outcome": "expired"} if number % 5 < 2 else each
        for number, each in enumerate(window(1.0, 2.0))
    ]
    short, _ = verdicts(rejected, earlier=window(2.0, 2.0))
    assert short.startswith("Short prompts: worse, with a change of -")
    assert "+40.0" in short


def test_a_verdict_needs_requests_in_both_windows() -> None:
    short, long = verdicts(window(1.0, 2.0)[::2], earlier=window(2.0, 2.0))
    assert short.startswith("Short prompts: better")
    assert long.startswith("Long prompts: not clear, because a report has too few of them")


def test_batch_work_has_its_own_row() -> None:
    text = page([*window(1.0, 2.0), *window(9.0, 9.0, priority="batch")])
    rows = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in text.splitlines() if "|" in row}
    assert (rows["short"], rows["long"], rows["priority batch"]) == ("200", "200", "400")
    assert "Batch requests are not counted among short or long prompts." in text


@pytest.mark.parametrize("cause", WaitCause)
def test_causes_have_the_words_of_explain(cause: WaitCause) -> None:
    text = page(window(1.0, 2.0, causes_s={cause.value: 0.5}))
    assert f"| {cause.meaning} " in text


# -- twin, for servers of different speed -----------------------------------------------------------------


# With one model for both servers, the error of the twin is 72 % and 81 %.
@pytest.mark.parametrize(("count", "rate_per_s"), [(450, 4.0), (900, 5.0)])
def test_each_server_is_simulated_at_its_own_speed(
    count: int, rate_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "_changes", lambda *_: {})
    lines = served(count, rate_per_s, (1.0, 3.0))
    forecast = Forecast(recording_of(lines, 10, 0.0), REPLICAS, SETTINGS, LONG_TOKENS - 1)
    found = forecast.document(lambda: None)
    assert found["reason"] == ""
    for of in found["error"].values():
        assert abs(of["ttft_mean_s"]["error_ratio"]) < MAX_ERROR_RATIO
        assert abs(of["tpot_mean_s"]["error_ratio"]) < MAX_ERROR_RATIO
