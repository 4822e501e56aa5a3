"""Rejections of the emulated engine, worded as vLLM's."""

import asyncio
from typing import Any

import openai
import pytest

from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.model import SchedulingPolicy
from tests.engines.servers import Served, served, until

MESSAGES: list[Any] = [{"role": "user", "content": "How long is this queue?"}]


async def test_a_prompt_beyond_the_context_is_rejected_in_vllms_words(engine: Served) -> None:
    with pytest.raises(openai.BadRequestError) as rejected:
        await engine.sdk.completions.create(model="tiny", prompt=[7] * 9_000, max_tokens=1)
    assert "maximum context length is 8192 tokens" in rejected.value.message
    assert "contains 9000 input tokens" in rejected.value.message
    assert (rejected.value.type, rejected.value.code, rejected.value.param) == (
        "BadRequestError",
        "400",
        "input_tokens",
    )
    for prompt, words in ((8_192, "at least 1"), (8_193, "maximum context length is 8192")):
        with pytest.raises(openai.BadRequestError, match=words):
            await engine.sdk.completions.create(
                model="tiny", prompt="x", extra_body={"ewsjf_prompt_tokens": prompt}
            )


async def test_an_output_beyond_the_context_is_rejected_and_one_beyond_what_is_left_is_cut(
    engine: Served,
) -> None:
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens=9000 cannot be greater than"):
        await engine.sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=9_000)
    answer = await engine.sdk.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=100,
        extra_body={"ewsjf_prompt_tokens": 8_190, "ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", b"{not json", "validation error"),
        ("chat/completions", b'{"model":"tiny"}', "messages"),
        ("chat/completions", b'{"model":"tiny","messages":[]}', "messages must not be empty"),
        ("chat/completions", b'{"messages":[{"role":"user","content":7}]}', "content"),
        ("chat/completions", b'{"messages":[{"content":"\xff"}]}', "validation error"),
        ("completions", b'{"prompt":"x","max_tokens":0}', "max_tokens must be at least 1, got 0"),
        ("completions", b'{"prompt":"x","n":0}', "n must be at least 1"),
        ("completions", b'{"prompt":"x","n":1000000000}', "n must be at most 16384"),
        ("completions", b'{"prompt":"x","tools":' + b"[" * 90_000, "recursion depth"),
        ("completions", b'{"prompt":"x","max_tokens":3,"min_tokens":4}', "min_tokens must be less"),
        ("completions", b'{"prompt":[]}', "prompt must not be empty"),
        ("completions", b'{"prompt":["a",1]}', "either texts or token ids"),
        ("completions", b'{"prompt":"x","stream_options":{}}', "Stream options"),
        ("completions", b'{"prompt":"x","priority":1}', "Priority scheduling is not enabled"),
        ("completions", b'{"prompt":"x","ewsjf_prompt_tokens":0}', "ewsjf_prompt_tokens"),
        ("responses", b'{"input":"x","n":2}', "n must be 1"),
        ("embeddings", b'{"input":"x","dimensions":1000000000}', "dimensions must be between"),
        ("embeddings", b'{"input":"x","encoding_format":"hex"}', "encoding_format"),
    ],
)
async def test_an_invalid_body_is_rejected(engine: Served, path: str, body: bytes, words: str) -> None:
    answer = await engine.http.post(f"/v1/{path}", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == 400
    assert words in error["message"]
    assert (await engine.engine.load()).running == 0


async def test_unknown_models_paths_and_methods_are_rejected(engine: Served) -> None:
    with pytest.raises(
        openai.NotFoundError, match=r"The model `other` does not exist\. Valid aliases: tiny, alias\."
    ):
        await engine.sdk.chat.completions.create(model="other", messages=MESSAGES)
    assert (await engine.http.get("/nowhere")).status_code == 404
    assert (await engine.http.get("/v1/completions")).status_code == 405


async def test_an_engine_with_priority_scheduling_accepts_priorities() -> None:
    settings = EmulatedEngineSettings(scheduling_policy=SchedulingPolicy.PRIORITY, max_num_seqs=1)
    async with served(settings) as it:

        async def ask(priority: int, output: int) -> int:
            await it.sdk.completions.create(
                model="emulated",
                prompt="x",
                max_tokens=output,
                extra_body={"priority": priority, "ignore_eos": True},
            )
            order.append(priority)
            return priority

        order: list[int] = []
        first = asyncio.create_task(ask(0, 60))
        await until(lambda: it.is_running(1))
        second = asyncio.create_task(ask(5, 2))
        await until(lambda: it.is_waiting(1))
        third = asyncio.create_task(ask(-5, 2))
        await asyncio.gather(first, second, third)
    assert order == [0, -5, 5]


async def test_a_full_engine_rejects_with_503() -> None:
    async with served(EmulatedEngineSettings(max_num_queued_reqs=2)) as it:
        body = {"prompt": "x", "n": 2, "max_tokens": 500, "ignore_eos": True}
        running = asyncio.create_task(it.http.post("/v1/completions", json=body))
        await until(lambda: it.is_running(2))
        rejected = await it.http.post("/v1/completions", json={"prompt": "x"})
        assert rejected.status_code == 503
        assert "currently busy" in rejected.json()["error"]["message"]
        assert (await it.metrics())["vllm:admission_rejections_total"] == 1
        running.cancel()
