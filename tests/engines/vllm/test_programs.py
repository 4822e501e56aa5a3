"""Agents on a real vLLM engine whose KV cache is too small for the conversations of all of them."""

import asyncio
from typing import Any

import openai
import pytest

from serve_app.core.programs import program_scheduler
from serve_app.core.settings import ProgramsSettings
from tests.engines.vllm.conversations import unique_text
from tests.engines.vllm.real import ANSWER_TIMEOUT_S, ARGS, QUICK_START, TINY, Running, running
from tests.engines.vllm.serving_stack import serving_stack
from tests.vllm_server import counter_total

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

AGENTS, TURNS = 8, 8
KV_TOKENS, BLOCK_TOKENS = 8_192, 32
SMALL_CACHE = {
    **ARGS,
    "max_model_len": 4_096,
    "max_num_seqs": AGENTS,
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": KV_TOKENS // BLOCK_TOKENS,
    "enable_prompt_tokens_details": True,
}


async def converse(client: openai.AsyncOpenAI, name: str) -> int:
    """Hold a growing conversation. Return the tokens of its last prompt."""
    messages: list[Any] = [
        {"role": "system", "content": " ".join(unique_text(f"{name} {n}") for n in range(4))}
    ]
    prompt_tokens = 0
    for number in range(TURNS):
        messages.append({"role": "user", "content": unique_text(f"{name}, step {number}")})
        stream = await client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-session-id": name},
        )
        answer = ""
        async for event in stream:
            answer += (event.choices[0].delta.content or "") if event.choices else ""
            prompt_tokens = event.usage.prompt_tokens if event.usage is not None else prompt_tokens
        messages.append({"role": "assistant", "content": answer})
    return prompt_tokens


async def computed_tokens(started: Running) -> float:
    """Return the prompt tokens that the engine has computed, from its metrics."""
    metrics = (await started.client.get("/metrics")).text
    prompts, hits = (
        counter_total(metrics, name) for name in ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total")
    )
    return prompts - hits


async def run_agents(started: Running, label: str, *, enabled: bool) -> float:
    """Let all agents converse at once. Return the prompt tokens that the engine computed for them."""
    before = await computed_tokens(started)
    programs = ProgramsSettings(enabled=enabled)
    async with serving_stack(started.engine, started.limits, programs=programs) as stack:
        client = openai.AsyncOpenAI(
            base_url=f"{stack.http.base_url}/v1", api_key="none", max_retries=0, timeout=ANSWER_TIMEOUT_S
        )
        async with client:
            last = await asyncio.gather(*(converse(client, f"{label} {n}") for n in range(AGENTS)))
    assert started.limits.kv_tokens is not None
    assert sum(last) > 2 * started.limits.kv_tokens
    return await computed_tokens(started) - before


async def test_programs_compute_fewer_tokens_when_their_contexts_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The model is so small that computing any context again would cost less than waiting.
    monkeypatch.setattr(program_scheduler, "_CHEAP_S", 0.0)
    async with running(TINY, args=SMALL_CACHE, env=QUICK_START) as started:
        without = await run_agents(started, "without", enabled=False)
        programs = await run_agents(started, "programs", enabled=True)
    assert programs < 0.7 * without
