"""Command `report` against an application with simulated traffic, and against a live one."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.serving.gateway import ApiKey
from tests.serving.channel.harness import scheduler_settings
from tests.serving.gateway.builders import MODEL, chat, emulated
from tests.serving.gateway.fleet import fleet_of, gathered

from .application import LONG_TOKENS, application, served

pytestmark = pytest.mark.application

SHORT_AT = ("--short-at", str(LONG_TOKENS - 1))


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the document and the page of a report in mode observe."""
    folder = tmp_path_factory.mktemp("report")
    with application(served(450)) as url, pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("serve_app.cli.report.command.print_result", printed.append)
        assert main(["report", "--url", url, *SHORT_AT, "--json", "--html", str(folder / "r.html")]) == 0
    return json.loads(printed[0]), (folder / "r.html").read_text()


def test_in_mode_observe_the_effect_of_scheduling_is_predicted(observed: tuple[dict[str, Any], str]) -> None:
    document, _ = observed
    forecast = document["forecast"]
    # The twin is the simulator that generated the traffic, so only the fit can be wrong.
    for of in forecast["error"].values():
        assert abs(of["ttft_mean_s"]["error_ratio"]) < 0.2
    short = forecast["changes"]["short"]["ttft_mean_s"]
    assert short["scheduled"]["mean"] < short["unscheduled"]["mean"]
    assert short["change"]["low"] < short["change"]["mean"] < short["change"]["high"]
    # Ten requests beyond a P99 take a thousand.
    assert "ttft_p99_s" not in forecast["changes"]["short"]
    assert {"short", "long", "tenant chat", "tenant <b>docs</b>"} <= forecast["changes"].keys()


def test_the_wait_behind_long_prefills_is_part_of_the_time_to_first_token(
    observed: tuple[dict[str, Any], str],
) -> None:
    document, _ = observed
    waits, short = document["short_waits"], document["observed"]["groups"]["short"]
    assert sum(waits.values()) == pytest.approx(short["ttft_mean_s"], abs=0.005)
    assert waits["behind_long_prefills"] > waits["own_prefill"]


def test_the_page_needs_no_other_file_and_escapes_names(observed: tuple[dict[str, Any], str]) -> None:
    _, page = observed
    assert not re.search(r"(?:src|href)=|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert "&lt;b&gt;docs&lt;/b&gt;" in page
    assert "<b>" not in page


def test_a_report_after_the_activation_is_compared_with_the_prediction(
    observed: tuple[dict[str, Any], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "observed.json"
    earlier.write_text(json.dumps(observed[0]))
    with application(served(450), active_share=1.0) as url:
        assert main(["report", "--url", url, "--compare", str(earlier)]) == 0
    text = capsys.readouterr().out
    assert f"Short prompts have at most {LONG_TOKENS - 1:,} tokens" in text
    assert "Predicted effect" not in text
    scheduled = observed[0]["forecast"]["changes"]["short"]["ttft_mean_s"]["scheduled"]["mean"]
    measured = observed[0]["observed"]["groups"]["short"]["ttft_mean_s"]
    row = next(
        line for line in text.partition("Prediction and")[2].splitlines() if line.startswith("| short")
    )
    assert f"{measured:.3f}" in row
    assert f"{scheduled:.3f} (" in row


def test_a_comparison_states_both_loads_and_why_nothing_was_predicted(
    observed: tuple[dict[str, Any], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two windows with equal request rates differ if prompts are longer in one of them."""
    reason = "the error of the twin is 21%, and may be at most 20%"
    without = {**observed[0], "forecast": {**observed[0]["forecast"], "changes": None, "reason": reason}}
    earlier = tmp_path / "observed.json"
    earlier.write_text(json.dumps(without))
    with application(served(300), active_share=1.0) as url:
        assert main(["report", "--url", url, "--compare", str(earlier)]) == 0
    comparison = capsys.readouterr().out.partition("Prediction and")[2]
    loads = re.findall(r"([\d.]+) requests/s and ([\d,]+) tokens/s", comparison)
    assert loads == [load_of(served(450)), load_of(served(300))]
    assert f"has no prediction: {reason}." in comparison


def load_of(lines: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the requests and tokens per second of a full capture."""
    ends = [line["arrived_at"] + line["total_s"] for line in lines]
    seconds = max(ends) - lines[0]["arrived_at"]
    tokens = sum(line["input_length"] + line["output_length"] for line in lines)
    return f"{len(lines) / seconds:.2f}", f"{tokens / seconds:,.0f}"


def test_a_twin_with_too_large_an_error_predicts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve_app.cli.report.command.MAX_ERROR_RATIO", 0.0001)
    with application(served(450)) as url:
        assert main(["report", "--url", url, *SHORT_AT]) == 0
    text = capsys.readouterr().out
    assert re.search(r"There is no prediction .* the error of the twin is \d+%, and may be at most 0%", text)
    assert "Error of the twin" in text
    assert "Predicted" not in text
    assert "Too few requests to predict" not in text


@pytest.mark.parametrize(
    ("lines", "options", "status", "says"),
    [
        ([], {}, 1, "no request has arrived and ended since the last change of the mode"),
        (served(150), {}, 1, "after 200 streamed responses (150 so far)"),
        (served(150), {"since": 4e9}, 1, "since the last change of the mode"),
        ([{"model": "m", "input_length": 5}], {}, 2, "older release"),
        (served(150), {"settings": {"modle": "m"}}, 2, "modle"),
    ],
)
def test_too_few_requests_and_older_applications_are_named(
    lines: list[dict[str, Any]],
    options: dict[str, Any],
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with application(lines, **options) as url:
        assert main(["report", "--url", url]) == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", '{"models": []}'])
def test_a_file_that_is_no_report_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert main(["report", "--compare", str(path)]) == 2
    assert f"{path}" in capsys.readouterr().err


async def test_a_live_application_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    settings = scheduler_settings(model=MODEL, active_share=0.0)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(emulated(speed_up=10.0)) for _ in range(2)]
        fleet = await stack.enter_async_context(
            fleet_of(
                [engine.app for engine in engines],
                settings=settings,
                keys=(ApiKey(tenant="acme", key="k1", admin=True),),
            )
        )
        headers, body = {"authorization": "Bearer k1"}, chat(stream=True, max_tokens=8)
        for _ in range(22):
            answers = await gathered(
                *(fleet.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(10))
            )
            assert {answer.status_code for answer in answers} == {200}
        plain = await fleet.http.get("/debug/capture", headers=headers)
        url = f"http://127.0.0.1:{fleet.port}"
        arguments = ["report", "--url", url, "--api-key", "k1", "--json"]
        assert await asyncio.to_thread(main, arguments) == 0
        assert await asyncio.to_thread(main, ["report", "--url", url]) == 2
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["observed"]["outcomes"] == {"default completed": 220}
    assert document["observed"]["groups"]["short"]["ttft_mean_s"] > 0
    assert document["forecast"]["error"].keys() <= {"short", "long"}
    assert "pass an admin key" in printed.err
    # Without the parameter, a capture has no names of tenants.
    assert "acme" not in plain.text
    assert "outcome" not in plain.text
