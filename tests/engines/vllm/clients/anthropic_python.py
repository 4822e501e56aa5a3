"""Anthropic's client for Python."""

import json
from typing import Any

import anthropic
import pytest

from tests.engines.vllm.clients.harness import (
    LONG,
    MODEL,
    QUESTION,
    SCHEMA,
    SCHEMA_TOKENS,
    Checks,
    ClientHarness,
    check_schema,
)
from tests.engines.vllm.weights.scripted import TOOL_NAME, TOOL_SCHEMA

SHORT: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}
CALL: Any = {
    **SHORT,
    "max_tokens": SCHEMA_TOKENS,
    # Without strict, vLLM lets a model write any JSON as arguments.
    "tools": [{"name": TOOL_NAME, "input_schema": TOOL_SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": TOOL_NAME},
}
PLACE: Any = {
    **SHORT,
    "max_tokens": SCHEMA_TOKENS,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}
# Anthropic's SDK has no parameters for these fields.
GREEDY: Any = {"extra_body": {"temperature": 0}}


async def answers(at: ClientHarness) -> None:
    message = await at.anthropic.messages.create(**SHORT, **GREEDY)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    cached = message.usage.cache_read_input_tokens or 0
    assert at.counted.prompt_tokens == message.usage.input_tokens + cached
    assert at.counted.cached_tokens == cached
    straight = await at.direct_answer("/v1/messages", max_tokens=8, temperature=0)
    assert message.content[0].type == "text"
    assert message.content[0].text == straight["content"][0]["text"]


async def streams(at: ClientHarness) -> None:
    before = at.first_tokens()
    async with at.anthropic.messages.stream(**SHORT, **GREEDY) as stream:
        text = "".join([part async for part in stream.text_stream])
        whole = await stream.get_final_message()
    assert whole.content[0].type == "text"
    assert whole.content[0].text == text
    assert at.first_tokens() == before + 1
    assert at.counted.output_tokens == whole.usage.output_tokens == 8


async def calls_tools(at: ClientHarness) -> None:
    for choice in (CALL["tool_choice"], {"type": "any"}):
        message = await at.anthropic.messages.create(**{**CALL, "tool_choice": choice}, **GREEDY)
        assert message.stop_reason == "tool_use"
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert call.name == TOOL_NAME
        check_schema(TOOL_SCHEMA, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is Paris."}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    request = {**CALL, "messages": [*QUESTION, *turns], "tool_choice": {"type": "none"}}
    again = await at.anthropic.messages.create(**request, **GREEDY)
    assert "tool_use" not in {again.stop_reason, *(block.type for block in again.content)}
    assert again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0) > message.usage.input_tokens


async def streams_tool_calls(at: ClientHarness) -> None:
    before = at.first_tokens()
    whole = await at.anthropic.messages.create(**CALL, **GREEDY)
    async with at.anthropic.messages.stream(**CALL, **GREEDY) as stream:
        arguments = "".join([event.partial_json async for event in stream if event.type == "input_json"])
        final = await stream.get_final_message()
    check_schema(TOOL_SCHEMA, arguments)
    assert final.content[-1].type == "tool_use"
    assert final.content[-1].input == json.loads(arguments)
    assert [without_id(block) for block in final.content] == [without_id(block) for block in whole.content]
    assert final.stop_reason == "tool_use"
    assert at.first_tokens() == before + 1


def without_id(block: Any) -> dict[str, Any]:
    found: dict[str, Any] = block.model_dump(exclude_none=True, exclude={"id", "signature", "caller"})
    return found


async def follows_a_schema(at: ClientHarness) -> None:
    message = await at.anthropic.messages.create(**PLACE, **GREEDY)
    assert message.stop_reason == "end_turn"
    assert message.content[0].type == "text"
    check_schema(SCHEMA, message.content[0].text)


async def counts_tokens(at: ClientHarness) -> None:
    counted = await at.anthropic.messages.count_tokens(model=MODEL, messages=QUESTION)
    await at.anthropic.messages.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert counted.input_tokens == at.counted.prompt_tokens


async def receives_errors(at: ClientHarness) -> None:
    with pytest.raises(anthropic.NotFoundError, match="unknown model") as unknown:
        await at.anthropic.messages.create(model="other", messages=QUESTION, max_tokens=1)
    assert unknown.value.response.json()["error"]["type"] == "not_found_error"
    at.reject_next_as_too_long()
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await at.anthropic.messages.create(model=MODEL, messages=LONG, max_tokens=9)
    # Errors of the engine: vLLM's own error types are not Anthropic's.
    for path, body in (
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "nobody", "content": "hi"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "nobody", "content": "hi"}]}),
    ):
        answer = await at.gateway.post(path, json={"model": MODEL, **body})
        error = answer.json()
        assert (answer.status_code, error["type"]) == (400, "error"), answer.text
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError):
        await at.anthropic.with_options(api_key="wrong").messages.create(
            model=MODEL, messages=QUESTION, max_tokens=1
        )


async def lists_models(at: ClientHarness) -> None:
    assert [model.id async for model in at.anthropic.models.list()] == [MODEL]


CHECKS: Checks = {
    ("`anthropic` (Python)", "answers"): answers,
    ("`anthropic` (Python)", "streams"): streams,
    ("`anthropic` (Python)", "tools"): calls_tools,
    ("`anthropic` (Python)", "streamed tools"): streams_tool_calls,
    ("`anthropic` (Python)", "JSON schemas"): follows_a_schema,
    ("`anthropic` (Python)", "counted tokens"): counts_tokens,
    ("`anthropic` (Python)", "errors"): receives_errors,
    ("`anthropic` (Python)", "list of models"): lists_models,
}
