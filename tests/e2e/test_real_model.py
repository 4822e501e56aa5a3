"""Real vLLM engines of shipped configurations: with a real model, and timed ones."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.real_vllm import (
    ENGINE_START_S,
    LONG,
    MODEL,
    check_capital_of_france,
    needs_model,
    sdk,
    send_request,
    shipped,
)
from tests.e2e.served import serve, wait_for

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900), needs_model]


def check_tools_and_missing_routes(client: openai.OpenAI, model: str = MODEL) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather: Any = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("auto", "required"):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
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
        client.embeddings.create(model=model, input="x")


def test_two_timed_engines_share_the_requests_by_their_length() -> None:
    with serve(shipped("timed_vllm"), start_timeout_s=ENGINE_START_S) as app:
        wait_for(lambda: app.pools() == {"short", "long"}, ENGINE_START_S, "both pools")
        with sdk(app) as client:
            for text, wanted in (("Hello!", "short"), (LONG, "long")):
                pool, answer = send_request(client, text, model="demo")
                assert (pool, answer.usage.completion_tokens) == (wanted, 20)
            check_tools_and_missing_routes(client, "demo")


def test_two_real_engines_share_the_requests_by_their_length() -> None:
    with serve(shipped("cpu_vllm"), start_timeout_s=ENGINE_START_S) as app:
        wait_for(lambda: app.pools() == {"short", "long"}, ENGINE_START_S, "both pools")
        with sdk(app) as client:
            check_capital_of_france(client)
            assert send_request(client, "What is the capital of France?")[0] == "short"
            pool, answer = send_request(client, LONG)
            assert pool == "long"
            # More than the short pool's context.
            assert answer.usage.prompt_tokens > 2_048
            check_tools_and_missing_routes(client)
