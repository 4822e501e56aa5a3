"""Answers assembled from streams: equal to the engine's own, with detection of silent engines."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.serving.gateway import UpstreamSettings

from .builders import (
    MODEL,
    FakeDispatcher,
    chat,
    chunk,
    emulated,
    error_json,
    http_client,
    streams,
)
from .conftest import GatewayHarness, running_gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "tell me"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


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
    # A new engine each time: texts and lengths depend on the request's number.
    async with emulated(profile="laptop", speed_up=20.0) as engine, http_client(engine.app) as http:
        whole = await http.post(path, json=document)
    dispatcher = FakeDispatcher([])
    async with (
        emulated(profile="laptop", speed_up=20.0) as engine,
        running_gateway(dispatcher, engine=engine.app, assemble_answers=True) as harness,
    ):
        answer = await harness.http.post(path, json=document)
    assert (answer.status_code, answer.headers["content-type"]) == (whole.status_code, "application/json")
    assert without_ids_and_times(answer.json()) == without_ids_and_times(whole.json())
    if whole.status_code == 200:
        (Completion if path == COMPLETIONS else ChatCompletion).model_validate(answer.json(), strict=True)
        streams = not {"tools", "echo", "stream_options"} & wanted.keys()
        assert ("first_token" in dispatcher.names()) is streams, "whether it was asked for as a stream"
        usage = dispatcher.events[-1][2]
        assert usage is not None
        assert usage.output_tokens == answer.json()["usage"]["completion_tokens"]


def without_ids_and_times(document: Any) -> Any:
    """Remove ids and times, and the annotations, which vLLM leaves null."""
    if isinstance(document, dict):
        left_out = {"id", "created", "annotations"}
        return {
            name: without_ids_and_times(value) for name, value in document.items() if name not in left_out
        }
    if isinstance(document, list):
        return [without_ids_and_times(value) for value in document]
    return document


@pytest.fixture
async def harness() -> AsyncIterator[GatewayHarness]:
    silent = UpstreamSettings(silence_timeout_s=0.6)
    async with running_gateway(assemble_answers=True, upstream=silent) as it:
        yield it


async def test_an_answer_that_takes_longer_than_any_silence_is_served(harness: GatewayHarness) -> None:
    harness.engine.token_delay_s = 0.1
    answer = await harness.http.post(CHAT, json=chat(max_tokens=15))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].split()[-1] == "w14"
    assert len(harness.engine.bodies) == 1


async def test_silence_in_the_middle_of_an_answer_ends_it(harness: GatewayHarness) -> None:
    harness.engine.answers.append(streams(chunk("w0"), 3_600))
    answer = await harness.http.post(CHAT, json=chat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
    assert len(harness.engine.bodies) == 1


@pytest.mark.parametrize(
    "rest",
    [[ConnectionError("the engine died")], [], [b'data: {"choices": 5}\n\n']],
    ids=["cut", "early", "unreadable"],
)
async def test_an_engine_lost_in_the_middle_is_replaced_transparently(
    harness: GatewayHarness, rest: list[Any]
) -> None:
    harness.engine.answers.append(streams(chunk("lost"), *rest))
    answer = await harness.http.post(CHAT, json=chat())
    assert answer.status_code == 200
    assert "lost" not in answer.text
    assert harness.dispatcher.put_backs() == [DispatchFailure.LOST]
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED]


@pytest.mark.parametrize(("code", "status", "tries"), [(500, 500, 2), (400, 400, 1)])
async def test_an_error_inside_the_stream_is_an_error_answer(
    harness: GatewayHarness, code: int, status: int, tries: int
) -> None:
    harness.engine.answers.extend([streams(error_json("no such image", code))] * 2)
    answer = await harness.http.post(CHAT, json=chat())
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "no such image"
    assert len(harness.engine.bodies) == tries


async def test_reasoning_and_text_are_joined_apart(harness: GatewayHarness) -> None:
    def part(finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
        return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    reasons = (part(role="assistant", content=""), part(reasoning="let "), part(reasoning="me"))
    harness.engine.answers.append(streams(*reasons, part(content="yes"), part("stop")))
    harness.engine.answers.append(streams(*reasons, part("stop")))
    both, alone = [(await harness.http.post(CHAT, json=chat())).json() for _ in range(2)]
    message = {"role": "assistant", "content": "yes", "refusal": None, "reasoning": "let me"}
    assert both["choices"][0]["message"] == message
    assert alone["choices"][0]["message"]["content"] is None


async def test_logprobs_of_each_choice_are_joined(harness: GatewayHarness) -> None:
    def part(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        logprobs = {"tokens": [text], "token_logprobs": [-0.5]}
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {"id": "x", "object": "text_completion", "choices": [choice]}

    harness.engine.answers.append(
        streams(part(0, "a"), part(1, "b"), part(0, "c", "stop"), part(1, "d", "stop"))
    )
    request_body = {"model": MODEL, "prompt": "x", "n": 2, "logprobs": 0}
    choices = (await harness.http.post(COMPLETIONS, json=request_body)).json()["choices"]
    assert [(choice["text"], choice["logprobs"]["tokens"]) for choice in choices] == [
        ("ac", ["a", "c"]),
        ("bd", ["b", "d"]),
    ]
    assert all(choice["logprobs"]["token_logprobs"] == [-0.5, -0.5] for choice in choices)
