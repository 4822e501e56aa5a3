"""A timed engine: vLLM's own server and scheduler, with iterations that take a profile's times."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from serve_app.engines.adapters.identify import identify
from serve_app.engines.adapters.server import PageResponse
from serve_app.engines.adapters.vllm import SELECTED_METRICS, read
from serve_app.engines.model.roofline import load_profile
from tests.engines.vllm.real import ENV, ROOT, Running, preemptions, running, unshared_prompt

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

MODEL = ROOT / "models/timed-llama31-8b"
NAME = "llama31-8b-rtx4090-tp1"
PROFILE = load_profile(NAME)
# The prompts of the test of preemptions fit into it, but not with their answers.
KV_BLOCKS = 128
# Less than a preempted sequence has to compute again.
BUDGET = 256
BLOCK_TOKENS = 16
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "degrees": {"type": "integer"},
        "sky": {"enum": ["clear", "grey"]},
        "hours": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["city", "degrees", "sky", "hours"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def timed() -> AsyncIterator[Running]:
    args = {
        "max_model_len": 2_048,
        "max_num_batched_tokens": BUDGET,
        "num_gpu_blocks_override": KV_BLOCKS + 1,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "tool_strict_level": "parameter",
    }
    env = {**ENV, "VLLM_SERVER_DEV_MODE": "1"}
    async with running(MODEL, args=args, env=env, timed=NAME) as started:
        yield started


async def completed(engine: Running, prompt: object, **fields: Any) -> dict[str, Any]:
    response = await engine.post("/v1/completions", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def chat(engine: Running, **fields: Any) -> dict[str, Any]:
    response = await engine.post("/v1/chat/completions", messages=QUESTION, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


@pytest.mark.asyncio(loop_scope="class")
class TestTimedEngine:
    async def test_its_limits_are_those_of_the_profile_unless_arguments_change_them(
        self, timed: Running
    ) -> None:
        assert timed.limits.kv_tokens == KV_BLOCKS * BLOCK_TOKENS
        assert timed.limits.max_num_seqs == PROFILE.max_num_seqs
        assert timed.limits.max_num_batched_tokens == BUDGET
        assert timed.limits.max_model_len == 2_048

    async def test_nothing_is_faster_than_the_profile(self, timed: Running) -> None:
        began = time.monotonic()
        answered = await completed(timed, unshared_prompt(1, 1_900), max_tokens=20, ignore_eos=True)
        took_s = time.monotonic() - began
        assert answered["usage"]["completion_tokens"] == 20
        step = PROFILE.step_time
        prefill_s = step.prefill_s(1_900, max_num_batched_tokens=BUDGET)
        assert took_s >= prefill_s + step.decode_run_s(19, sequences=1, context_tokens=1_901)

    async def test_equal_prompts_have_equal_answers_of_random_length(self, timed: Running) -> None:
        prompts = [f"Question {number}" for number in range(8)]
        asked = (completed(timed, prompt, max_tokens=400) for prompt in [*prompts, prompts[0]])
        answers = await asyncio.gather(*asked)
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[-1]
        assert len(set(texts)) == len(prompts)
        assert len({answer["usage"]["completion_tokens"] for answer in answers}) > len(prompts) // 2
        assert {answer["choices"][0]["finish_reason"] for answer in answers} >= {"stop"}

    async def test_a_preempted_sequence_has_the_answer_that_it_would_have_had(self, timed: Running) -> None:
        async def texts(numbers: range) -> list[str]:
            asked = (
                completed(timed, unshared_prompt(each, 200), max_tokens=300, ignore_eos=True)
                for each in numbers
            )
            answers = await asyncio.gather(*asked)
            assert {answer["usage"]["completion_tokens"] for answer in answers} == {300}
            return [answer["choices"][0]["text"] for answer in answers]

        before = await preemptions(timed)
        under_pressure = await texts(range(8))
        assert (preempted := await preemptions(timed)) > before
        assert under_pressure == [*await texts(range(4)), *await texts(range(4, 8))]
        assert await preemptions(timed) == preempted

    async def test_an_answer_follows_its_schema(self, timed: Running) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
        choice = await chat(timed, response_format=form)
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"]).keys() == SCHEMA["properties"].keys()

    async def test_a_forced_tool_call_has_valid_arguments(self, timed: Running) -> None:
        named = {"type": "function", "function": {"name": "weather"}}
        for tool_choice in ("required", named):
            choice = await chat(timed, tools=[TOOL], tool_choice=tool_choice)
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]).keys() == SCHEMA["properties"].keys()

    async def test_several_outputs_and_log_probabilities(self, timed: Running) -> None:
        answered = await completed(timed, "Hi", max_tokens=5, min_tokens=5, n=3, logprobs=2)
        assert [len(choice["logprobs"]["tokens"]) for choice in answered["choices"]] == [5, 5, 5]
        assert answered["usage"]["completion_tokens"] == 15

    async def test_a_repeated_prefix_is_read_from_the_cache(self, timed: Running) -> None:
        prompt = unshared_prompt(77, 800)
        await completed(timed, prompt, max_tokens=1)
        again = await completed(timed, prompt, max_tokens=1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 800 - BLOCK_TOKENS

    async def test_its_load_is_read_from_a_page_of_the_metrics_that_are_needed(self, timed: Running) -> None:
        async def get(path: str) -> PageResponse:
            response = await timed.client.get(path)
            return PageResponse(response.status_code, response.content)

        server = await identify(get)
        assert server.metrics_path == SELECTED_METRICS
        pages = [(await get(path)).body for path in (SELECTED_METRICS, "/metrics")]
        assert server.read(pages[0]) == server.read(pages[1])
        assert len(pages[0]) < len(pages[1]) / 10

    async def test_it_sleeps_and_wakes_up(self, timed: Running) -> None:
        assert (await timed.client.post("/sleep", params={"level": 1})).status_code == 200
        assert (await timed.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert read((await timed.client.get(SELECTED_METRICS)).content).sleeps
        assert (await timed.client.post("/wake_up")).status_code == 200
        assert not read((await timed.client.get(SELECTED_METRICS)).content).sleeps
        assert (await completed(timed, "Hi", max_tokens=2))["usage"]["completion_tokens"] == 2
