"""LangChain's client for OpenAI's API."""

from typing import Any

import openai
import pytest

from tests.engines.vllm.clients.harness import (
    KEY,
    LONG,
    MODEL,
    SCHEMA,
    SCHEMA_TOKENS,
    Checks,
    ClientHarness,
    check_schema,
)
from tests.engines.vllm.weights.scripted import TOOL_NAME, TOOL_SCHEMA

ASK = "What is the capital of France?"
# LangChain names a schema and a tool by its title.
PLACE = {"title": "place", "description": "A place.", **SCHEMA}
TOOL = {"title": TOOL_NAME, "description": "A place.", **TOOL_SCHEMA}


def chat(at: ClientHarness, max_tokens: int = 8, **options: Any) -> Any:
    """Return LangChain's chat model; skip the test if its package is not installed."""
    package = pytest.importorskip("langchain_openai", reason="run `scripts/setup clients`")
    given = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "max_retries": 0, **options}
    return package.ChatOpenAI(base_url=f"{at.url}/v1", api_key=KEY, **given)


async def answers(at: ClientHarness) -> None:
    message = await chat(at).ainvoke(ASK)
    straight = await at.direct_answer("/v1/chat/completions", max_tokens=8, temperature=0)
    assert message.content == straight["choices"][0]["message"]["content"]
    assert at.counted.output_tokens == message.usage_metadata["output_tokens"] == 8


async def streams(at: ClientHarness) -> None:
    before = at.first_tokens()
    whole = await chat(at).ainvoke(ASK)
    pieces = [piece async for piece in chat(at, stream_usage=True).astream(ASK)]
    assert "".join(piece.content for piece in pieces) == whole.content
    (counted,) = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert at.counted.output_tokens == counted["output_tokens"] == 8
    assert at.first_tokens() == before + 1


async def calls_tools(at: ClientHarness) -> None:
    message = await with_tool(at).ainvoke(ASK)
    (call,) = message.tool_calls
    assert (call["name"], message.invalid_tool_calls) == (TOOL_NAME, [])
    check_schema(TOOL_SCHEMA, call["args"])


async def streams_tool_calls(at: ClientHarness) -> None:
    whole = await with_tool(at).ainvoke(ASK)
    gathered = None
    async for piece in with_tool(at).astream(ASK):
        gathered = piece if gathered is None else gathered + piece
    assert gathered is not None
    (call,) = gathered.tool_calls
    check_schema(TOOL_SCHEMA, call["args"])
    assert (call["name"], call["args"]) == (TOOL_NAME, whole.tool_calls[0]["args"])


def with_tool(at: ClientHarness) -> Any:
    return chat(at, SCHEMA_TOKENS).bind_tools([TOOL], tool_choice=TOOL_NAME, strict=True)


async def follows_a_schema(at: ClientHarness) -> None:
    model = chat(at, SCHEMA_TOKENS).with_structured_output(PLACE, method="json_schema")
    check_schema(SCHEMA, await model.ainvoke(ASK))


async def receives_errors(at: ClientHarness) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        await chat(at, model="other").ainvoke(ASK)
    at.reject_next_as_too_long()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await chat(at).ainvoke(LONG)


CHECKS: Checks = {
    ("`langchain-openai` (Python)", "answers"): answers,
    ("`langchain-openai` (Python)", "streams"): streams,
    ("`langchain-openai` (Python)", "tools"): calls_tools,
    ("`langchain-openai` (Python)", "streamed tools"): streams_tool_calls,
    ("`langchain-openai` (Python)", "JSON schemas"): follows_a_schema,
    ("`langchain-openai` (Python)", "errors"): receives_errors,
}
