"""The page of a report: names of causes, batch work, and the verdict of a comparison."""

import random
from typing import Any

import pytest

from serve_app.cli.report.command import observed, recording_of
from serve_app.cli.report.page import as_text
from serve_app.core.accounting.wait_causes import WaitCause

from .test_recording import line


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
