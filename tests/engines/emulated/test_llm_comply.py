"""llm-comply and its schemas against a gateway over an emulated engine."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import llm_comply
import pytest
from llm_comply.schema import SpecLoader

from tests.serving.gateway.builders import MODEL, emulated
from tests.serving.gateway.conftest import running_gateway

# llm-comply resolves references by a class of jsonschema that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

# Checks that llm-comply skips: it runs them only for models with names such as gpt-5 or claude-sonnet-4.
REASONING = {"chat-reasoning-summary", "reasoning-summary", "anth-thinking-display"}
# OpenAI describes the reason of a chunk as nullable, but not in the list of its values.
NULL_REASON = "finish_reason: None is not "
SCHEMAS = Path(llm_comply.__file__).parent / "specs"
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 90}
CHAT_TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALLED = {"tools": [CHAT_TOOL], "tool_choice": "required"}
ANTHROPIC_CALLED = {"tools": [{"name": "clock", "input_schema": {}}], "tool_choice": {"type": "any"}}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CHUNK = "CreateChatCompletionStreamResponse"


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    # Answers always end by themselves.
    lengths = {"mean_output_tokens": 8.0, "output_tokens_sigma": 0.0}
    async with emulated(**lengths) as engine, running_gateway(engine=engine.app) as harness:
        yield harness.http


@pytest.mark.parametrize(("api", "checks"), [("openai-chat", 9), ("open-responses", 13), ("anthropic", 9)])
async def test_what_is_served_passes_llm_comply(http: httpx.AsyncClient, api: str, checks: int) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llm_comply.cli", "--json", "--format", api),
        *("--base-url", str(http.base_url.join("/v1")), "--api-key", "none", "--model", MODEL),
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await program.communicate()
    results = json.loads(written)["results"]
    assert len(results) >= checks
    faults = {each["id"]: each["errors"] for each in results if each["status"] != "passed"}
    assert faults.keys() == REASONING & {each["id"] for each in results}, faults


def events(answer: httpx.Response) -> list[Any]:
    """Return the objects of a stream."""
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "more", "schemas", "schema"),
    [
        (CHAT, {"stream_options": {"include_usage": True}}, "openai_chat", CHUNK),
        (CHAT, CALLED, "openai_chat", CHUNK),
        ("/v1/completions", {"prompt": "hello"}, "openai_chat", "CreateCompletionResponse"),
        (MESSAGES, {}, "anthropic", "MessageStreamEvent"),
        (MESSAGES, ANTHROPIC_CALLED, "anthropic", "MessageStreamEvent"),
    ],
)
async def test_the_events_of_streams_match_their_schemas(
    http: httpx.AsyncClient, path: str, more: dict[str, Any], schemas: str, schema: str
) -> None:
    """llm-comply checks only that these events exist, except those of the Responses API."""
    found = events(await http.post(path, json={**ASKED, "stream": True, **more}))
    assert found
    loader = SpecLoader(str(SCHEMAS / f"{schemas}.json"))
    faults = [fault for event in found for fault in loader.validate(event, schema)]
    assert [fault for fault in faults if NULL_REASON not in fault] == []


async def test_a_response_repeats_the_fields_of_its_request(http: httpx.AsyncClient) -> None:
    stated: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"trace": "7"},
        "temperature": 0.2,
        "tool_choice": "none",
        "reasoning": {"effort": "low"},
        "max_output_tokens": 3,
    }
    asked = {"model": MODEL, "input": "hello", "tools": [{"type": "function", "name": "clock"}], **stated}
    first, *_, last = events(await http.post("/v1/responses", json={**asked, "stream": True}))
    whole = (await http.post("/v1/responses", json=asked)).json()
    loader = SpecLoader(str(SCHEMAS / "openresponses.json"))
    for response in (first["response"], last["response"], whole):
        assert loader.validate(response, "ResponseResource") == []
        assert response["reasoning"].pop("summary") is None
        assert {name: response[name] for name in stated} == stated
        assert [each["name"] for each in response["tools"]] == ["clock"]
