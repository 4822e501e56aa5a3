"""Ends of answers, as the scheduler receives them, for each API, whole and streamed."""

import json
from typing import Any

import pytest

from serve_app.request import TurnEnd, Usage
from serve_app.serving.gateway.answer.stream import StreamScanner, counts_of
from tests.serving.channel.harness import wait_until
from tests.serving.gateway import builders
from tests.serving.gateway.builders import MODEL, chat, emulated, streams, usage_json
from tests.serving.gateway.conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
# Without a limit, the emulated engine ends an answer by itself.
LONG = 3_000
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {**chat(), "max_tokens": LONG},
    COMPLETIONS: {"model": MODEL, "prompt": "hello", "max_tokens": LONG},
    RESPONSES: {"model": MODEL, "input": "hello", "max_output_tokens": LONG},
    MESSAGES: {**chat(), "max_tokens": LONG},
}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    MESSAGES: {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
}


async def ending(harness: GatewayHarness, path: str, **fields: Any) -> TurnEnd | None:
    """Send a request, and return the end of its answer as it was reported."""
    answer = await harness.http.post(path, json={**ASKED[path], **fields})
    assert answer.status_code == 200, answer.text
    usage = harness.dispatcher.events[-1][2]
    assert isinstance(usage, Usage)
    return usage.ending


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
async def test_answers_end_by_themselves_at_a_limit_or_with_calls_of_tools(path: str, stream: bool) -> None:
    async with (
        emulated(profile="laptop", speed_up=200.0) as engine,
        running_gateway(engine=engine.app) as harness,
    ):
        assert await ending(harness, path, stream=stream) is TurnEnd.DONE
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        assert await ending(harness, path, stream=stream, **{limit: 3}) is TurnEnd.OTHER
        if path in TOOLS:
            assert await ending(harness, path, stream=stream, **TOOLS[path]) is TurnEnd.TOOLS


async def test_an_assembled_answer_has_the_end_of_its_stream() -> None:
    async with running_gateway(assemble_answers=True) as harness:
        assert await ending(harness, CHAT, max_tokens=3) is TurnEnd.DONE
        assert b'"stream":true' in harness.engine.bodies[0]


async def test_a_client_that_leaves_its_stream_reports_no_end() -> None:
    async with running_gateway() as harness:
        harness.engine.token_delay_s = 0.02
        request_body = {**ASKED[CHAT], "max_tokens": 500, "stream": True}
        async with harness.http.stream("POST", CHAT, json=request_body) as answer:
            await anext(answer.aiter_lines())
        await wait_until(harness.dispatcher.outcomes)
        assert harness.dispatcher.events[-1][2] is None


async def test_a_stream_without_usage_reports_no_end() -> None:
    async with running_gateway() as harness:
        harness.engine.answers.append(streams(builders.chunk("hi", finish_reason="stop")))
        await harness.http.post(CHAT, json=chat(stream=True))
        assert harness.dispatcher.events[-1][2] is None


def chunk(*reasons: str | None, usage: bool = False) -> bytes:
    """Return an event of a chat with one choice for each reason."""
    choices: list[dict[str, Any]] = [
        {"index": n, "delta": {}, "finish_reason": reason} for n, reason in enumerate(reasons)
    ]
    return data_event({"choices": choices, "usage": usage_json(7, 2) if usage else None})


def data_event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def scanned(*pieces: bytes) -> TurnEnd | None:
    scanner = StreamScanner(hide_usage=True)
    for piece in pieces:
        scanner.feed(piece)
    assert scanner.usage is not None
    return scanner.usage.ending


QUOTED = data_event({"choices": [{"delta": {"content": '"finish_reason":"length"'}, "finish_reason": None}]})


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([chunk("stop"), chunk(usage=True)], TurnEnd.DONE),
        ([chunk("function_call"), chunk(usage=True)], TurnEnd.TOOLS),
        ([chunk("content_filter"), chunk(usage=True)], TurnEnd.OTHER),
        ([chunk("stop", usage=True)], TurnEnd.DONE),
        ([chunk("stop", "tool_calls"), chunk(usage=True)], TurnEnd.TOOLS),
        # Usage in each event.
        ([chunk("tool_calls", usage=True), chunk(None, "stop", usage=True)], TurnEnd.TOOLS),
        ([QUOTED, chunk(usage=True)], None),
        ([chunk(usage=True)], None),
    ],
)
def test_the_finish_reasons_of_a_stream_are_read_however_it_is_split(
    events: list[bytes], end: TurnEnd | None
) -> None:
    stream = b"".join(events)
    assert scanned(*events, b"data: [DONE]\n\n") is end
    assert scanned(stream) is end
    for place in range(len(stream)):
        assert scanned(stream[:place], stream[place:]) is end


@pytest.mark.parametrize(
    ("document", "end"),
    [
        ({"choices": [{"finish_reason": "stop"}, {"finish_reason": "tool_calls"}]}, TurnEnd.TOOLS),
        ({"choices": [{"finish_reason": "stop", "stop_reason": "tool_use"}]}, TurnEnd.DONE),
        ({"choices": [{"finish_reason": None}]}, None),
        (
            {"status": "completed", "output": [{"type": "reasoning"}, {"type": "function_call"}]},
            TurnEnd.TOOLS,
        ),
        ({"status": "completed", "output": [{"type": "mcp_call"}, {"type": "message"}]}, TurnEnd.DONE),
        ({"status": "incomplete", "output": [{"type": "function_call"}]}, TurnEnd.OTHER),
        ({"stop_reason": "stop_sequence"}, TurnEnd.DONE),
        ({"stop_reason": "refusal"}, TurnEnd.OTHER),
        # Answers of other shapes keep their usage.
        ({"choices": "none", "status": 5}, None),
        ({}, None),
    ],
)
def test_the_end_of_a_whole_answer(document: dict[str, Any], end: TurnEnd | None) -> None:
    usage = counts_of(json.dumps({**document, "usage": usage_json(7, 2)}).encode()).usage
    assert usage == Usage(prompt_tokens=7, output_tokens=2, ending=end)
