"""Answers assembled from streams: equal to the engine's own, with detection of silent engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from serve_app.core.events import DispatchFailure
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.engine import Scope, Send
from serve_app.errors import Outcome
from serve_app.serving.gateway import UpstreamSettings
from tests.engines.servers import Served, served

from .builders import (
    MODEL,
    FakeDispatcher,
    chat,
    error_json,
    gateway,
    send_event,
    serving,
    start_stream,
)
from .conftest import Stage, staged

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@asynccontextmanager
async def emulated() -> AsyncIterator[Served]:
    """Start a new engine each time: texts and lengths depend on the request's number."""
    settings = EmulatedEngineSettings(served_model_names=(MODEL,), profile="laptop", speed_up=20.0)
    async with served(settings) as engine:
        yield engine


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 20}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 20, "stream": False}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 9, "n": 3}),
        (CHAT, {"messages": MESSAGES, "ewsjf_output_tokens": 6}),
        # The emulated engine rejects this one.
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
        (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 20}),
        (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "max_tokens": 7}),
        (COMPLETIONS, {"prompt": "Once upon", "echo": True, "max_tokens": 7}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 20, "tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 20, "stream_options": {"include_usage": True}}),
    ],
)
async def test_an_assembled_answer_is_the_engines_own(path: str, wanted: dict[str, Any]) -> None:
    document = {"model": MODEL, **wanted}
    async with emulated() as engine:
        whole = await engine.http.post(path, json=document)
    async with emulated() as engine:
        port = engine.http.base_url.port
        assert port is not None
        dispatcher = FakeDispatcher([port])
        app = gateway(dispatcher, assemble_answers=True)
        async with (
            serving(app) as gateway_port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway_port}", timeout=30) as http,
        ):
            answer = await http.post(path, json=document)
        app.close()
    assert (answer.status_code, answer.headers["content-type"]) == (whole.status_code, "application/json")
    assert apart_from_ids(answer.json()) == apart_from_ids(whole.json())
    if whole.status_code == 200:
        (Completion if path == COMPLETIONS else ChatCompletion).model_validate(answer.json(), strict=True)
        streams = not {"tools", "echo", "stream_options"} & wanted.keys()
        assert ("first_token" in dispatcher.names()) is streams, "whether it was asked for as a stream"
        usage = dispatcher.events[-1][2]
        assert usage is not None
        assert usage.output_tokens == answer.json()["usage"]["completion_tokens"]


def apart_from_ids(document: Any) -> Any:
    if isinstance(document, dict):
        return {
            name: apart_from_ids(value) for name, value in document.items() if name not in {"id", "created"}
        }
    if isinstance(document, list):
        return [apart_from_ids(value) for value in document]
    return document


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    silent = UpstreamSettings(silence_timeout_s=0.6)
    async with staged(assemble_answers=True, upstream=silent) as it:
        yield it


async def test_an_answer_that_takes_longer_than_any_silence_is_served(stage: Stage) -> None:
    stage.engine.token_delay_s = 0.1
    answer = await stage.http.post(CHAT, json=chat(max_tokens=15))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].split()[-1] == "w14"
    assert len(stage.engine.bodies) == 1


async def test_silence_in_the_middle_of_an_answer_ends_it(stage: Stage) -> None:
    async def hangs(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        await send_event(send, {"choices": [{"index": 0, "delta": {"content": "w0"}}]})
        await asyncio.sleep(3_600)

    stage.engine.answers.append(hangs)
    answer = await stage.http.post(CHAT, json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
    assert len(stage.engine.bodies) == 1


@pytest.mark.parametrize("ends", ["cut", "early", "unreadable"])
async def test_an_engine_lost_in_the_middle_is_replaced_transparently(stage: Stage, ends: str) -> None:
    async def breaks(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        await send_event(send, {"choices": [{"index": 0, "delta": {"content": "lost"}}]})
        if ends == "cut":
            raise ConnectionError("the engine died")
        if ends == "unreadable":
            await send({"type": "http.response.body", "body": b'data: {"choices": 5}\n\n', "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    stage.engine.answers.append(breaks)
    answer = await stage.http.post(CHAT, json=chat())
    assert answer.status_code == 200
    assert "lost" not in answer.text
    assert [event[1] for event in stage.dispatcher.events if event[0] == "put_back"] == [DispatchFailure.LOST]
    assert stage.dispatcher.outcomes() == [Outcome.COMPLETED]


@pytest.mark.parametrize(("code", "status", "tries"), [(500, 500, 2), (400, 400, 1)])
async def test_an_error_inside_the_stream_is_an_error_answer(
    stage: Stage, code: int, status: int, tries: int
) -> None:
    async def fails(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        await send_event(send, error_json("no such image", code))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    stage.engine.answers.extend([fails] * 2)
    answer = await stage.http.post(CHAT, json=chat())
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "no such image"
    assert len(stage.engine.bodies) == tries


async def test_reasoning_and_text_are_joined_apart(stage: Stage) -> None:
    async def reasons(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        deltas = [{"role": "assistant", "content": ""}, {"reasoning": "let "}, {"reasoning": "me"}]
        for delta in (*deltas, *([{"content": "yes"}] if parsed["max_tokens"] > 5 else [])):
            await send_event(send, {"id": "x", "choices": [{"index": 0, "delta": delta}]})
        await send_event(send, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    stage.engine.answers.extend([reasons] * 2)
    both, alone = [(await stage.http.post(CHAT, json=chat(max_tokens=n))).json() for n in (9, 5)]
    assert both["choices"][0]["message"] == {"role": "assistant", "content": "yes", "reasoning": "let me"}
    assert alone["choices"][0]["message"]["content"] is None


async def test_logprobs_of_each_choice_are_joined(stage: Stage) -> None:
    async def counts(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        for index, text in ((0, "a"), (1, "b"), (0, "c"), (1, "d")):
            logprobs = {"tokens": [text], "token_logprobs": [-0.5]}
            reason = "stop" if text in "cd" else None
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            await send_event(send, {"id": "x", "object": "text_completion", "choices": [choice]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    stage.engine.answers.append(counts)
    asked = {"model": MODEL, "prompt": "x", "n": 2, "logprobs": 0}
    choices = (await stage.http.post(COMPLETIONS, json=asked)).json()["choices"]
    assert [(choice["text"], choice["logprobs"]["tokens"]) for choice in choices] == [
        ("ac", ["a", "c"]),
        ("bd", ["b", "d"]),
    ]
    assert all(choice["logprobs"]["token_logprobs"] == [-0.5, -0.5] for choice in choices)


async def test_without_the_setting_bodies_are_forwarded_unchanged() -> None:
    async with staged() as stage:
        await stage.http.post(CHAT, json=chat())
        assert json.loads(stage.engine.bodies[0]) == chat()
