"""`explain` and `capture` against a real gateway with fixed scheduler answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from tests.serving.gateway.builders import MODEL, Answers, FakeDispatcher, serving

RECEIPT: dict[str, Any] = {
    "request_id": "gw-1",
    "client_request_id": "mine",
    "endpoint": "/v1/chat/completions",
    "model": MODEL,
    "tenant": "acme",
    "class": "batch",
    "outcome": "completed",
    "message": "",
    "arrived_at": 0.0,
    "stages": [
        {"stage": "gateway", "ms": 0.5},
        {"stage": "channel", "ms": 0.25},
        {"stage": "queue", "ms": 3_000.0},
        {
            "stage": "until_first_token",
            "ms": 1_000.0,
            "parts": [
                {"part": "engine_queue", "ms": 960.0, "estimated": True},
                {"part": "prefill", "ms": 40.0, "estimated": True},
            ],
        },
    ],
    "queue": {
        "ms": 3_000.0,
        "predicted_ms": 2_500.0,
        "causes": [
            {"cause": "higher_class", "ms": 2_000.0, "meaning": "a higher class got the slots"},
            {"cause": "engines_busy", "ms": 1_000.0, "meaning": "no engine accepted more requests"},
        ],
        "ahead": {"higher_class": 12},
        "served": {
            "pool": "short",
            "requests": 14,
            "by": [{"class": "interactive", "tenant": "rival", "requests": 12}],
            "others": 2,
            "is_complete": False,
        },
    },
    "latency_target": {
        "ttft_ms": 1_500.0,
        "tpot_ms": 33.5,
        "refuse": False,
        "expected_ttft_ms": 900.0,
        "chance_of_miss": 0.25,
        "ttft_met": False,
    },
    "longest_gap": {"ms": 210.0, "cause": "prefill", "prefill_tokens": 20_000},
    "attempts": [{"pool": "short", "replica": "r1", "length_queue": "q0", "expected_prefill_ms": 40.0}],
    "tokens": {
        "prompt": 50,
        "expected_prompt": 48,
        "cached": 0,
        "output": 5,
        "expected_output": 7.5,
    },
}
WAITING: dict[str, Any] = {
    **RECEIPT,
    "request_id": "gw-2",
    "outcome": None,
    "state": "waiting",
    "stages": [{"stage": "queue", "ms": 3_000.0}],
    "queue": {
        **RECEIPT["queue"],
        "meaning": "no engine accepted more requests",
        "pool": "short",
        "position": 3,
        "waiting": 12,
        "expected_ms": 400.0,
        "expected_between_ms": [150.0, 1_900.0],
        "expires_in_ms": 57_000.0,
    },
    "attempts": [],
    "tokens": {**RECEIPT["tokens"], "prompt": None, "cached": None, "output": None},
}
PROGRAM: dict[str, Any] = {
    "model": MODEL,
    "program": "job",
    "tenant": "acme",
    "state": "in a gap",
    "conversations": 2,
    "turns": 2,
    "queued_s": 4.0,
    "waiting_s": 3.0,
    "engine_s": 11.0,
    "gap_s": 25.0,
    "age_s": 60.0,
    "first_token_s": 8.0,
    "generation_s": 2.0,
    "tool_gap_s": 20.0,
    "tokens": {"prompt": 122_000, "cached": 40_000, "again": 20_500, "output": 200},
    "last_turns": [
        {
            "request_id": "gw-7",
            "session": "helper",
            "is_sub_agent": True,
            "state": "completed",
            "arrived_s_ago": 20.0,
            "gap_s": None,
            "queued_s": 4.0,
            "waiting_s": 3.0,
            "first_token_s": 2.0,
            "generation_s": 1.5,
            "engine_s": 3.5,
            "prompt_tokens": 62_000,
            "cached_tokens": 40_000,
            "output_tokens": 100,
        }
    ],
}
LINE = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": []}


async def run_command(*args: str, lines: int = 1) -> int:
    """Run a command in a thread, beside the gateway that it calls."""

    async def nothing() -> dict[str, Any]:
        return {}

    async def freeze(_reason: str) -> None:
        return None

    async def receipt(request_id: str) -> dict[str, Any]:
        if request_id == "gw-2":
            return WAITING
        return RECEIPT if request_id in ("gw-1", "a/b c") else {}

    async def program(name: str) -> dict[str, Any]:
        return {"model": MODEL, "programs": [PROGRAM] if name == "job/1" else []}

    async def capture() -> list[dict[str, Any]]:
        return [LINE] * lines

    views = Answers(
        queue=nothing,
        status=nothing,
        freeze=freeze,
        receipt=receipt,
        program=program,
        capture=capture,
    )
    settings = GatewaySettings(
        models=(ServedModel(name=MODEL),), keys=(ApiKey(tenant="t", key="k1", admin=True),)
    )
    gateway = Gateway(settings, {MODEL: FakeDispatcher([])}, "gw", {MODEL: views})
    async with serving(gateway) as port:
        url = ("--url", f"http://127.0.0.1:{port}")
        code = await asyncio.to_thread(main, [*args, *url])
    gateway.close()
    return code


@pytest.mark.parametrize("request_id", ["gw-1", "a/b c"])
async def test_explain_shows_the_causes_of_a_wait(
    request_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_command("explain", request_id, "--api-key", "k1") == 0

    output = capsys.readouterr().out
    assert "gw-1: completed, batch of tenant acme" in output
    assert "4,000.8 ms" in output
    assert "75%" in output
    assert "12 (higher class)" in output
    assert "of this: engine queue (estimated)" in output
    assert "during the wait: at least 12 interactive of tenant rival, 2 of other tenants" in output
    assert "predicted wait: 2,500.0 ms, actual: 3,000.0 ms" in output
    assert "latency target: 1,500 ms to the first token, 33.5 ms per output token; expected" in output
    assert "expected first token after 900 ms" in output
    assert ", chance of a miss 25%; late" in output
    assert "longest gap of the stream: 210.0 ms, beside a prefill of 20,000 tokens" in output
    assert output.index("a higher class got") < output.index("no engine accepted more")


async def test_explain_shows_the_state_of_a_waiting_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_command("explain", "gw-2", "--api-key", "k1") == 0

    output = capsys.readouterr().out
    assert "gw-2: waiting now, batch of tenant acme" in output
    assert "position 3 of 12 for pool short (no engine accepted more requests)" in output
    assert "expected to start in 400 ms (80 % interval: 150 to 1,900 ms); queue timeout" in output
    assert "queue timeout in 57,000 ms" in output
    assert "predicted wait: 2,500.0 ms, so far: 3,000.0 ms" in output


async def test_explain_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_command("explain", "gw-1", "--json", "--api-key", "k1") == 0

    assert json.loads(capsys.readouterr().out) == RECEIPT


async def test_explain_gives_the_reason_for_a_missing_receipt(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_command("explain", "unknown", "--api-key", "k1") != 0
    assert "no receipt for 'unknown'" in capsys.readouterr().err

    assert await run_command("explain", "gw-1", "--api-key", "wrong") != 0
    assert "--api-key" in capsys.readouterr().err


async def test_explain_shows_where_the_time_of_a_program_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_command("explain", "--program", "job/1", "--api-key", "k1") == 0

    output = capsys.readouterr().out
    assert "job: in a gap, 2 turns of 2 conversations, tenant acme" in output
    lines = {line.split("|")[1].strip(): line.split("|")[2:] for line in output.splitlines() if "|" in line}
    expected = {
        "queue": "4.0",
        "of this: for KV cache": "3.0",
        "engine until the first token": "8.0",
        # A quarter of the computed tokens.
        "of this: context computed again (by tokens)": "2.0",
        "of this: new tokens (by tokens)": "6.0",
        "generation": "2.0",
        "engine, answers not streamed": "1.0",
        "gaps after calls of tools": "20.0",
        "other gaps": "5.0",
    }
    assert {name: lines[name][0].strip() for name in expected} == expected
    assert "50%" in lines["gaps after calls of tools"][1]
    assert "prompt 122,000 (40,000 cached, 20,500 computed again, 61,500 new), output 200" in output
    assert lines["gw-7"][0].strip() == "sub-agent helper"
    assert [cell.strip() for cell in lines["gw-7"][2:5]] == ["-", "4.0", "3.0"]


async def test_explain_states_what_is_not_known_of_a_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {**PROGRAM["tokens"], "cached": 0}
    monkeypatch.setitem(PROGRAM, "tokens", tokens)
    monkeypatch.setitem(PROGRAM, "last_turns", [])
    assert await run_command("explain", "--program", "job/1", "--api-key", "k1") == 0
    output = capsys.readouterr().out
    assert "not known how many were cached: the engines report none" in output
    assert "computed again" not in output

    assert await run_command("explain", "--program", "job/1", "--json", "--api-key", "k1") == 0
    assert json.loads(capsys.readouterr().out) == {"programs": [PROGRAM]}


@pytest.mark.parametrize("args", [[], ["gw-1", "--program", "job/1"]])
def test_explain_takes_a_request_or_a_program(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *args])
    assert "--program" in capsys.readouterr().err


async def test_explain_names_an_unknown_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_command("explain", "--program", "unknown", "--api-key", "k1") != 0
    assert "no program 'unknown'" in capsys.readouterr().err


async def test_capture_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "not" / "yet" / "captured.jsonl"

    assert await run_command("capture", "--out", str(out), "--api-key", "k1", lines=3) == 0

    assert [json.loads(line) for line in out.read_text().splitlines()] == [{**LINE, "model": MODEL}] * 3
    assert "3 requests" in capsys.readouterr().out


async def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_command("capture", "--out", str(tmp_path), "--api-key", "k1") != 0

    assert f"{tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


async def test_an_empty_capture_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "captured.jsonl"

    assert await run_command("capture", "--out", str(out), "--api-key", "k1", lines=0) != 0

    assert "no request with token counts completed" in capsys.readouterr().err
    assert not out.exists()
