"""A real model on real vLLM engines, as configs/cpu_vllm.yaml and configs/remote.yaml have it."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.e2e.real_vllm import ENGINE_START_S, MODEL, needs_model, vllm_server
from tests.e2e.served import ROOT, Served, serve, wait_for

# About 3,000 tokens of English.
LONG = (ROOT / "LICENSE").read_text()[:11_000] + "\nWhat is the capital of France?"

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900), needs_model]


def shipped(name: str) -> dict[str, Any]:
    """The arguments in one of our configurations."""
    content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    args: dict[str, Any] = content["applications"][0]["args"]
    return args


def sdk(app: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", timeout=300, max_retries=0)


def ask(client: openai.OpenAI, text: str, **options: Any) -> tuple[str, Any]:
    """The pool that served it, and the completion."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=20, temperature=0, **options
    )
    return raw.headers["x-pool"], raw.parse()


def check_capital_of_france(client: openai.OpenAI) -> None:
    _, answer = ask(client, "What is the capital of France?")
    assert "Paris" in (answer.choices[0].message.content or "")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
        stream=True,
    )
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def check_tools_and_missing_routes(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather: Any = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("auto", "required"):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=question,
            tools=[weather],
            tool_choice=choice,
            max_tokens=80,
            temperature=0,
        )
        calls = answer.choices[0].message.tool_calls or []
        assert calls or choice == "auto"
        for call in calls:
            assert call.type == "function"
            assert json.loads(call.function.arguments).keys() == {"city"}
    with pytest.raises(openai.NotFoundError, match="does not serve /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_two_real_engines_share_the_requests_by_their_length() -> None:
    with serve(shipped("cpu_vllm"), start_timeout_s=ENGINE_START_S) as app:
        wait_for(lambda: app.pools() == {"short", "long"}, ENGINE_START_S, "both pools")
        with sdk(app) as client:
            check_capital_of_france(client)
            assert ask(client, "What is the capital of France?")[0] == "short"
            pool, answer = ask(client, LONG)
            assert pool == "long"
            # More than the short pool's engine holds.
            assert answer.usage.prompt_tokens > 2_048
            check_tools_and_missing_routes(client)


def test_a_real_server_started_by_hand_serves_behind_a_remote_pool(tmp_path: Path) -> None:
    with vllm_server(tmp_path / "vllm.log") as server:
        args = shipped("remote")
        args["models"][0]["pools"][0]["engine"]["remote"]["endpoints"] = [server.url]
        with serve(args) as app, sdk(app) as client:
            check_capital_of_france(client)
            assert ask(client, LONG)[1].usage.prompt_tokens > 2_048
