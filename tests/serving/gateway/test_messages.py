"""Anthropic's API through the gateway with Anthropic's SDK: messages, events, tools, errors."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import pytest

from serve_app.core.events import DispatchFailure
from serve_app.engines.engine import ASGIApp
from serve_app.errors import Outcome
from serve_app.request import TurnEnd, Usage
from serve_app.serving.gateway import ApiKey
from tests.serving.channel.harness import wait_until

from .builders import (
    ANTHROPIC_START,
    ANTHROPIC_TEXT,
    MODEL,
    Engine,
    FakeDispatcher,
    emulated,
    error_json,
    rejection,
    replies,
    streams,
)
from .conftest import running_gateway

PATH = "/v1/messages"
HELLO: Any = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object"}
WEATHER: Any = {"name": "get_weather", "description": "of a city", "input_schema": SCHEMA}

PING = {"type": "ping"}


@dataclass
class AnthropicHarness:
    """A gateway with an Anthropic client and an engine."""

    dispatcher: FakeDispatcher
    http: httpx.AsyncClient
    sdk: anthropic.AsyncAnthropic
    engine: Engine


@asynccontextmanager
async def running_anthropic_gateway(
    engine: ASGIApp | None = None, **settings: Any
) -> AsyncIterator[AnthropicHarness]:
    async with running_gateway(engine=engine, **settings) as harness:
        url = f"http://127.0.0.1:{harness.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k1", max_retries=0, timeout=30) as sdk:
            yield AnthropicHarness(harness.dispatcher, harness.http, sdk, harness.engine)


@pytest.fixture
async def anthropic_harness() -> AsyncIterator[AnthropicHarness]:
    async with (
        emulated(profile="laptop", speed_up=20.0) as engine,
        running_anthropic_gateway(engine.app) as made,
    ):
        yield made


@pytest.fixture
async def scripted() -> AsyncIterator[AnthropicHarness]:
    """Run a gateway with keys over an engine that a test scripts."""
    async with running_anthropic_gateway(keys=(ApiKey(tenant="t", key="k1"),)) as made:
        yield made


def used(message: anthropic.types.Message) -> tuple[int, int]:
    """Return the prompt tokens and the generated tokens."""
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


async def test_a_message_is_answered_and_its_tokens_are_counted(anthropic_harness: AnthropicHarness) -> None:
    message = await anthropic_harness.sdk.messages.create(**HELLO, system="Be brief.")
    assert message.type == "message"
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert message.stop_reason == "max_tokens"
    prompt, output = used(message)
    assert output == 6
    assert anthropic_harness.dispatcher.events[-1] == (
        "finished",
        Outcome.COMPLETED,
        Usage(prompt_tokens=prompt, output_tokens=6, cached_tokens=0, ending=TurnEnd.OTHER),
    )
    assert anthropic_harness.dispatcher.submissions[0].spec.max_output_tokens == 6


async def test_cached_tokens_are_counted_with_the_prompt(anthropic_harness: AnthropicHarness) -> None:
    long: Any = {**HELLO, "system": "All words are equal. " * 60}
    first, again = [await anthropic_harness.sdk.messages.create(**long) for _ in range(2)]
    assert again.usage.cache_read_input_tokens
    assert used(again)[0] == used(first)[0]
    usage = anthropic_harness.dispatcher.events[-1][2]
    assert usage == Usage(
        prompt_tokens=used(first)[0],
        output_tokens=6,
        cached_tokens=again.usage.cache_read_input_tokens,
        ending=TurnEnd.OTHER,
    )


async def test_an_agent_calls_a_tool_and_continues_with_its_result(
    anthropic_harness: AnthropicHarness,
) -> None:
    question: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What weather is it?"}]}]
    request: Any = {**HELLO, "messages": question, "tools": [WEATHER]}
    async with anthropic_harness.sdk.messages.stream(**request, tool_choice={"type": "any"}) as stream:
        message = await stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use"
    assert (message.stop_reason, call.name) == ("tool_use", "get_weather")
    assert call.input == {}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    request["messages"] = [
        *question,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    last = await anthropic_harness.sdk.messages.create(**request)
    assert last.content[0].type == "text"
    # Earlier turns are part of the prompt and of the measured size.
    first, then = (submission.spec.shape for submission in anthropic_harness.dispatcher.submissions[-2:])
    assert then.messages > first.messages
    assert then.tool_bytes > first.tool_bytes


async def test_output_parameters_reach_the_engine(scripted: AnthropicHarness) -> None:
    changes: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "stop_sequences": ["e"],
        "thinking": {"type": "adaptive"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    scripted.engine.answers.append(replies(200, {"type": "message", "usage": {"input_tokens": 1}}))
    await scripted.sdk.messages.create(**{**HELLO, **changes})
    assert json.loads(scripted.engine.bodies[0]).items() >= changes.items()


async def test_tokens_are_counted_by_any_replica(anthropic_harness: AnthropicHarness) -> None:
    counted = await anthropic_harness.sdk.messages.count_tokens(model=MODEL, messages=HELLO["messages"])
    assert counted.input_tokens == used(await anthropic_harness.sdk.messages.create(**HELLO))[0]
    assert len(anthropic_harness.dispatcher.submissions) == 1


async def test_the_beginning_of_a_message_is_not_its_first_token(scripted: AnthropicHarness) -> None:
    async def look() -> None:
        await wait_until(lambda: "acquire" in scripted.dispatcher.names())
        assert "first_token" not in scripted.dispatcher.names()

    scripted.engine.answers.append(streams(ANTHROPIC_START, PING, look, *ANTHROPIC_TEXT, ends=b""))
    async with scripted.sdk.messages.stream(**HELLO) as stream:
        kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert "content_block_delta" in kinds
    assert scripted.dispatcher.names() == ["acquire", "first_token", "finished"]
    # The last event counts generated tokens, the first one prompt tokens.
    assert scripted.dispatcher.events[-1][2] == Usage(
        prompt_tokens=13, output_tokens=7, cached_tokens=4, ending=TurnEnd.DONE
    )


async def test_an_engine_that_dies_after_the_beginning_is_replaced_transparently(
    scripted: AnthropicHarness,
) -> None:
    dies = streams(ANTHROPIC_START, PING, ConnectionResetError())
    scripted.engine.answers += [dies, streams(*ANTHROPIC_TEXT, ends=b"")]
    answer = await scripted.http.post(
        PATH, json={**HELLO, "stream": True}, headers={"x-api-key": "k1", "anthropic-version": "2023-06-01"}
    )
    assert "message_start" not in answer.text
    assert '"hi"' in answer.text
    assert scripted.dispatcher.put_backs() == [DispatchFailure.LOST]


async def test_a_break_in_a_message_is_an_error_that_the_sdk_raises(scripted: AnthropicHarness) -> None:
    scripted.engine.answers.append(streams(ANTHROPIC_START, *ANTHROPIC_TEXT[:2], ConnectionResetError()))
    with pytest.raises(anthropic.APIStatusError, match="failed during its answer"):
        async for _ in await scripted.sdk.messages.create(**HELLO, stream=True):
            pass
    assert scripted.dispatcher.outcomes() == [Outcome.FAILED]


@pytest.mark.parametrize(
    ("outcome", "status", "kind"),
    [
        (Outcome.REJECTED_QUEUE_FULL, 529, "overloaded_error"),
        (Outcome.REJECTED_DEADLINE_UNMEETABLE, 529, "overloaded_error"),
        (Outcome.REJECTED_RATE_LIMITED, 429, "rate_limit_error"),
        (Outcome.REJECTED_NO_REPLICA, 503, "overloaded_error"),
        (Outcome.REJECTED_TOO_LONG, 400, "invalid_request_error"),
        (Outcome.EXPIRED, 504, "timeout_error"),
        (Outcome.FAILED, 502, "api_error"),
    ],
)
async def test_rejections_are_in_anthropics_format(
    scripted: AnthropicHarness, outcome: Outcome, status: int, kind: str
) -> None:
    scripted.dispatcher.script.append(rejection(outcome, "not now", retry_after_s=2.0))
    with pytest.raises(anthropic.APIStatusError) as raised:
        await scripted.sdk.messages.create(**HELLO)
    answer = raised.value.response
    assert (answer.status_code, answer.json()) == (
        status,
        {"type": "error", "error": {"type": kind, "message": "not now"}},
    )
    assert answer.headers["retry-after"] == "2"
    assert raised.value.request_id == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("changes", "status", "kind", "words"),
    [
        ({"model": "other"}, 404, "not_found_error", "unknown model"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": 5}, 400, "invalid_request_error", "messages"),
    ],
)
async def test_the_gateways_own_rejections_are_in_anthropics_format(
    scripted: AnthropicHarness, changes: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = await scripted.http.post(PATH, json={**HELLO, **changes}, headers={"x-api-key": "k1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, kind)
    assert words in error["message"]


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize(
    "document",
    [
        error_json("no such thing", 400),
        {"type": "error", "error": {"type": "BadRequestError", "message": "no such thing"}},
        {"detail": "no such thing"},
    ],
)
async def test_an_engines_error_has_anthropics_shape(
    scripted: AnthropicHarness, path: str, document: dict[str, Any]
) -> None:
    scripted.engine.answers.append(replies(400, document))
    answer = await scripted.http.post(path, json=HELLO, headers={"x-api-key": "k1"})
    assert (answer.status_code, answer.json()) == (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "no such thing"}},
    )


async def test_a_key_is_accepted_as_anthropics_clients_send_it(scripted: AnthropicHarness) -> None:
    scripted.engine.answers.append(replies(200, {"type": "message", "usage": {"input_tokens": 1}}))
    assert (await scripted.http.post(PATH, json=HELLO, headers={"x-api-key": "k1"})).status_code == 200
    for wrong in ({"x-api-key": "k2"}, {}, {"x-api-key": "k1", "authorization": "Bearer k2"}):
        answer = await scripted.http.post(PATH, json=HELLO, headers=wrong)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    # The key is for the gateway and never reaches an engine.
    assert b"x-api-key" not in scripted.engine.heads[0]


async def test_a_rejection_in_a_stream_that_waits_is_an_error_event() -> None:
    async with running_anthropic_gateway(queue_comment_interval_s=0.05) as waiting:
        waiting.dispatcher.gate.clear()
        waiting.dispatcher.script.append(rejection(Outcome.EXPIRED, "waited too long"))
        body = {**HELLO, "stream": True}
        async with waiting.http.stream("POST", PATH, json=body) as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if line == ": queued":
                    waiting.dispatcher.gate.set()
        assert answer.status_code == 200
        event = lines.index("event: error")
        error = json.loads(lines[event + 1].removeprefix("data: "))
        assert error == {"type": "error", "error": {"type": "timeout_error", "message": "waited too long"}}
