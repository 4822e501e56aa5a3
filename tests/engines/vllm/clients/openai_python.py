"""OpenAI's client for Python."""

import asyncio
import json
from typing import Any

import openai
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

# Other clients of this API send the same request.
SHORT: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
# Without strict, vLLM lets a model write any JSON as arguments.
TOOL: Any = {"type": "function", "function": {"name": TOOL_NAME, "parameters": TOOL_SCHEMA, "strict": True}}
CALL: Any = {
    **SHORT,
    "max_tokens": SCHEMA_TOKENS,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": TOOL_NAME}},
}
PLACE: Any = {
    **SHORT,
    "max_tokens": SCHEMA_TOKENS,
    "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
}


async def answers(at: ClientHarness) -> None:
    answer = await at.openai.chat.completions.create(**SHORT)
    assert answer.usage is not None
    assert at.counted.output_tokens == answer.usage.completion_tokens == 8
    straight = await at.direct_answer("/v1/chat/completions", max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == straight["choices"][0]["message"]["content"]


async def streams(at: ClientHarness) -> None:
    before = at.first_tokens()
    stream = await at.openai.chat.completions.create(**SHORT, stream=True)
    assert [chunk async for chunk in stream]
    assert at.first_tokens() == before + 1
    assert at.counted.output_tokens == 8


async def calls_tools(at: ClientHarness) -> None:
    # A named tool and one that the model must choose: both end as a client expects.
    for choice, reason in ((CALL["tool_choice"], "stop"), ("required", "tool_calls")):
        answer = await at.openai.chat.completions.create(**{**CALL, "tool_choice": choice})
        assert answer.choices[0].finish_reason == reason
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == TOOL_NAME
        check_schema(TOOL_SCHEMA, call.function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "It is Paris."}
    messages = [*QUESTION, answer.choices[0].message, result]
    again = await at.openai.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert again.usage is not None
    assert answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens
    assert at.counted.output_tokens == again.usage.completion_tokens == 8


async def streams_tool_calls(at: ClientHarness) -> None:
    before = at.first_tokens()
    whole = await at.openai.chat.completions.create(**CALL)
    async with at.openai.chat.completions.stream(**CALL) as stream:
        arguments = "".join(
            [e.arguments_delta async for e in stream if e.type == "tool_calls.function.arguments.delta"]
        )
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.arguments == arguments
    check_schema(TOOL_SCHEMA, arguments)
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    (complete_call,) = whole.choices[0].message.tool_calls or []
    assert complete_call.type == "function"
    assert complete_call.function.arguments == arguments
    assert at.first_tokens() == before + 1


async def follows_a_schema(at: ClientHarness) -> None:
    answer = await at.openai.chat.completions.create(**PLACE)
    assert answer.choices[0].finish_reason == "stop"
    check_schema(SCHEMA, answer.choices[0].message.content)


async def receives_errors(at: ClientHarness) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        await at.openai.chat.completions.create(model="other", messages=QUESTION)
    at.reject_next_as_too_long()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await at.openai.chat.completions.create(model=MODEL, messages=LONG)
    with pytest.raises(openai.AuthenticationError):
        await at.openai.with_options(api_key="wrong").models.list()


async def lists_models(at: ClientHarness) -> None:
    assert [model.id for model in (await at.openai.models.list()).data] == [MODEL]


BATCH = "\n".join(
    json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": SHORT})
    for n in range(3)
)


async def runs_batches(at: ClientHarness) -> None:
    file = await at.openai.files.create(file=("in.jsonl", BATCH.encode()), purpose="batch")
    batch = await at.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in {"completed", "failed"}:
        await asyncio.sleep(0.2)
        batch = await at.openai.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    lines = (await at.openai.files.content(batch.output_file_id)).text.splitlines()
    check_batch(list(map(json.loads, lines)), await at.direct_answer("/v1/chat/completions", **SHORT))


def check_batch(lines: list[Any], straight: Any) -> None:
    """Raise unless each line has the answer that the engine itself gives."""
    assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
    contents = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert contents == {straight["choices"][0]["message"]["content"]}


CHECKS: Checks = {
    ("`openai` (Python)", "answers"): answers,
    ("`openai` (Python)", "streams"): streams,
    ("`openai` (Python)", "tools"): calls_tools,
    ("`openai` (Python)", "streamed tools"): streams_tool_calls,
    ("`openai` (Python)", "JSON schemas"): follows_a_schema,
    ("`openai` (Python)", "errors"): receives_errors,
    ("`openai` (Python)", "list of models"): lists_models,
    ("`openai` (Python)", "batches"): runs_batches,
}
