"""`explain` and `capture` against a real gateway with fixed scheduler answers."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from tests.serving.gateway.builders import MODEL, Answers, FakeDispatcher, serving

RECEIPT: dict[str, Any] = json.loads("""{
"request_id": "gw-1", "model": "tiny", "tenant": "acme", "class": "batch", "outcome": "completed",
"message": "", "stages": [
  {"stage": "gateway", "ms": 0.5}, {"stage": "channel", "ms": 0.25}, {"stage": "queue", "ms": 3000.0},
  {"stage": "until_first_token", "ms": 1000.0, "parts": [
    {"part": "engine_queue", "ms": 960.0, "estimated": true}]}],
"queue": {"ms": 3000.0, "predicted_ms": 2500.0, "ahead": {"higher_class": 12}, "causes": [
    {"cause": "engines_busy", "ms": 1000.0, "meaning": "no engine accepted more requests"},
    {"cause": "higher_class", "ms": 2000.0, "meaning": "a higher class got the slots"}],
  "served": {"pool": "short", "requests": 14, "others": 2, "is_complete": false,
    "by": [{"class": "interactive", "tenant": "rival", "requests": 12}]}},
"latency_target": {"ttft_ms": 1500.0, "tpot_ms": 33.5, "refuse": false, "expected_ttft_ms": 900.0,
  "chance_of_miss": 0.25, "ttft_met": false},
"longest_gap": {"ms": 210.0, "cause": "prefill", "prefill_tokens": 20000},
"attempts": [{"pool": "short", "replica": "r1", "length_queue": "q0", "expected_prefill_ms": 40.0}],
"tokens": {"prompt": 50, "expected_prompt": 48, "cached": 0, "output": 5, "expected_output": 7.5}}""")
PLACE = json.loads("""{"pool": "short", "position": 3, "waiting": 12, "expected_ms": 400.0,
"expected_between_ms": [150.0, 1900.0], "expires_in_ms": 57000.0, "meaning": "no engine is free"}""")
PROGRAM: dict[str, Any] = json.loads("""{
"model": "tiny", "program": "job", "tenant": "acme", "state": "in a gap", "conversations": 2, "turns": 2,
"queued_s": 4.0, "waiting_s": 3.0, "engine_s": 11.0, "gap_s": 25.0, "age_s": 60.0, "first_token_s": 8.0,
"generation_s": 2.0, "tool_gap_s": 20.0,
"tokens": {"prompt": 122000, "cached": 40000, "again": 20500, "output": 200},
"last_turns": [{"request_id": "gw-7", "session": "helper", "is_sub_agent": true, "state": "completed",
  "gap_s": null, "queued_s": 4.0, "waiting_s": 3.0, "first_token_s": 2.0, "generation_s": 1.5,
  "engine_s": 3.5, "prompt_tokens": 62000, "cached_tokens": 40000, "output_tokens": 100}]}""")
RECEIPTS = {
    "a/b c": RECEIPT,
    "gw-2": RECEIPT | {"outcome": None, "state": "waiting", "queue": RECEIPT["queue"] | PLACE},
}
PROGRAMS = {
    "job/1": PROGRAM,
    "uncounted": PROGRAM | {"tokens": PROGRAM["tokens"] | {"cached": 0}, "last_turns": []},
}
LINE = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": []}


async def run_command(*args: str, key: str = "k1", lines: int = 1) -> int:
    """Run a command in a thread, beside the gateway that it calls."""

    async def receipt(request_id: str) -> dict[str, Any]:
        return RECEIPTS.get(request_id, {})

    async def program(name: str) -> dict[str, Any]:
        return {"model": MODEL, "programs": [PROGRAMS[name]] if name in PROGRAMS else []}

    async def capture() -> list[dict[str, Any]]:
        return [LINE] * lines

    keys = (ApiKey(tenant="t", key="k1", admin=True),)
    settings = GatewaySettings(models=(ServedModel(name=MODEL),), keys=keys)
    views = Answers(receipt=receipt, program=program, capture=capture)
    gateway = Gateway(settings, {MODEL: FakeDispatcher([])}, "gw", {MODEL: views})
    async with serving(gateway) as port:
        url = f"http://127.0.0.1:{port}"
        code = await asyncio.to_thread(main, [*args, "--url", url, "--api-key", key])
    gateway.close()
    return code


ENDED = """\
gw-1: completed, batch of tenant acme, model tiny, 4,000.8 ms
until first token 1,000.0 25%
of this: engine queue (estimated) 960.0 24%
a higher class got the slots 2,000.0 67%
no engine accepted more requests 1,000.0 33%
requests that took a slot it could have used: 12 (higher class)
dispatched to pool short during the wait: at least 12 interactive of tenant rival, 2 of other tenants
predicted wait: 2,500.0 ms, actual: 3,000.0 ms
latency target: 1,500 ms to the first token, 33.5 ms per output token; \
expected first token after 900 ms, chance of a miss 25%; late
longest gap of the stream: 210.0 ms, beside a prefill of 20,000 tokens
attempt 1: pool short, replica r1, length queue q0, expected prefill 40.0 ms
tokens: prompt 50 (expected 48, 0 cached), output 5 (expected 8)"""
WAITS = """\
gw-1: waiting now, batch of tenant acme, model tiny, 4,000.8 ms
position 3 of 12 for pool short (no engine is free); expected to start in 400 ms \
(80 % interval: 150 to 1,900 ms); queue timeout in 57,000 ms
predicted wait: 2,500.0 ms, so far: 3,000.0 ms"""
# A quarter of the computed tokens was computed again.
TURNS = """\
job: in a gap, 2 turns of 2 conversations, tenant acme, model tiny, started 60 s ago
queue 4.0 10%
of this: for KV cache 3.0 8%
engine until the first token 8.0 20%
of this: context computed again (by tokens) 2.0 5%
of this: new tokens (by tokens) 6.0 15%
generation 2.0 5%
engine, answers not streamed 1.0 2%
gaps after calls of tools 20.0 50%
other gaps 5.0 12%
tokens: prompt 122,000 (40,000 cached, 20,500 computed again, 61,500 new), output 200
gw-7 sub-agent helper completed - 4.0 3.0 2.0 1.5 3.5 62,000 40,000 100"""
UNCOUNTED = "tokens: prompt 122,000 (not known how many were cached: the engines report none), output 200"


@pytest.mark.parametrize(
    ("args", "document", "text"),
    [
        (["a/b c"], RECEIPT, ENDED),
        (["gw-2"], RECEIPTS["gw-2"], WAITS),
        (["--program", "job/1"], {"programs": [PROGRAM]}, TURNS),
        (["--program", "uncounted"], {"programs": [PROGRAMS["uncounted"]]}, UNCOUNTED),
    ],
)
async def test_explain_prints_where_the_time_went(
    args: list[str], document: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_command("explain", *args) == 0

    # Without the borders and bars of tables.
    lines = [" ".join(re.sub("[|#]", " ", line).split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in text.splitlines()] == text.splitlines()
    printed = " ".join(lines)
    assert ("computed again" in printed) is ("turns, in s" in printed) is (text == TURNS)

    assert await run_command("explain", *args, "--json") == 0
    assert json.loads(capsys.readouterr().out) == document


async def test_capture_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "not" / "yet" / "captured.jsonl"

    assert await run_command("capture", "--out", str(out), lines=3) == 0

    assert [json.loads(line) for line in out.read_text().splitlines()] == [{**LINE, "model": MODEL}] * 3
    assert "3 requests" in capsys.readouterr().out


async def test_an_empty_capture_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "captured.jsonl"

    assert await run_command("capture", "--out", str(out), lines=0) != 0

    assert "no request with token counts completed" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "key", "reason"),
    [
        (
            ["explain", "unknown"],
            "k1",
            "no receipt for 'unknown': use the x-request-id of the response. Receipts expire ten minutes",
        ),
        (["explain", "unknown"], "k1", "Requests that the gateway rejected (invalid body, key or model"),
        (["explain", "gw-2"], "wrong", "--api-key"),
        (["explain", "--program", "unknown"], "k1", "no program 'unknown'"),
        (["capture", "--out", "/"], "k1", "/ cannot be written: Is a directory"),
    ],
)
async def test_a_failure_is_reported_with_its_reason(
    args: list[str], key: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_command(*args, key=key) != 0
    assert reason in capsys.readouterr().err
