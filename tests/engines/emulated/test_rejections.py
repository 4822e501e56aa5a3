"""Rejections of the emulated engine: context limits in vLLM's words, invalid bodies, and what it lacks."""

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
    with pytest.raises(openai.BadRequestError, match="max_tokens=9000 cannot be greater than"):
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
        ("chat/completions", b"{not json", "invalid body"),
        ("chat/completions", b'{"model":"tiny"}', "messages"),
        ("chat/completions", b'{"model":"tiny","messages":[]}', "messages"),
        ("chat/completions", b'{"messages":[{"content":"\xff"}]}', "invalid body"),
        ("completions", b'{"prompt":"x","max_tokens":0}', "max_tokens"),
        ("completions", b'{"prompt":"x","max_tokens":"three"}', "max_tokens"),
        ("completions", b'{"prompt":"x","n":1000000000}', "$.n"),
        ("completions", b'{"prompt":"x","tools":' + b"[" * 90_000, "recursion depth"),
        ("completions", b'{"prompt":[]}', "prompt"),
        ("completions", b'{"prompt":["a",1]}', "either texts or token ids"),
        ("completions", b'{"prompt":"x","ewsjf_prompt_tokens":0}', "ewsjf_prompt_tokens"),
    ],
)
async def test_an_invalid_body_is_rejected(engine: Served, path: str, body: bytes, words: str) -> None:
    answer = await engine.http.post(f"/v1/{path}", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == 400
    assert words in error["message"]
    assert (await engine.engine.load()).running == 0


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "ask", "field"),
    [
        ("chat/completions", {"messages": MESSAGES, "response_format": JSON_SCHEMA}, "response_format"),
        ("completions", {"prompt": "x", "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ("responses", {"input": "x", "text": {"format": JSON_SCHEMA}}, "text.format"),
    ],
)
async def test_a_format_of_the_answer_is_rejected(
    engine: Served, path: str, ask: dict[str, Any], field: str
) -> None:
    answer = await engine.http.post(f"/v1/{path}", json=ask)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field} is not supported by the emulated engine")


async def test_responses_are_not_stored(engine: Served) -> None:
    """As in vLLM without its store, which ignores `store`."""
    create = engine.sdk.responses.create
    made = await create(model="tiny", input="x", max_output_tokens=2, store=True)
    assert (made.status, made.to_dict()["store"]) == ("incomplete", False)
    for store in (True, False):
        with pytest.raises(openai.BadRequestError, match="does not support the background mode") as rejected:
            await create(model="tiny", input="x", background=True, store=store)
        assert (rejected.value.type, rejected.value.param) == ("invalid_request_error", "background")
    for stream in (True, False):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found") as missing:
            await create(model="tiny", input="x", previous_response_id=made.id, stream=stream)
        assert (missing.value.type, missing.value.param) == ("invalid_request_error", "response_id")
    for method, path in (("GET", ""), ("POST", "/cancel")):
        answer = await engine.http.request(method, f"/v1/responses/{made.id}{path}")
        assert answer.status_code == 404


async def test_other_parameters_nulls_and_plain_text_are_accepted(engine: Served) -> None:
    names = ("temperature", "stop", "logprobs", "tools", "tool_choice", "response_format", "n", "max_tokens")
    body: dict[str, Any] = dict.fromkeys((*names, "structured_outputs", "stream_options"))
    for wanted in (body, {"stop": ["a"], "logprobs": True, "response_format": {"type": "text"}}):
        answer = await engine.http.post("/v1/chat/completions", json={"messages": MESSAGES, **wanted})
        assert answer.status_code == 200, answer.text


async def test_a_number_may_be_written_as_another_type(engine: Served) -> None:
    """As in vLLM."""
    numbers = {"max_tokens": "3", "ignore_eos": 1, "n": 2.0}
    answer = (await engine.http.post("/v1/completions", json={"prompt": [7.0, 8.0], **numbers})).json()
    assert (len(answer["choices"]), answer["usage"]["completion_tokens"]) == (2, 6)


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
