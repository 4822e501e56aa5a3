"""Emulated engine through a real server, with an HTTP client and OpenAI's SDK."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion
from pydantic import TypeAdapter, ValidationError

from serve_app.engines.adapters.vllm import read
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import Engine
from serve_app.engines.model import SchedulingPolicy
from serve_app.errors import EngineError, SettingsError
from tests.engines.servers import Served, served, until

MESSAGES: list[Any] = [{"role": "user", "content": "How long is this queue?"}]


def usage_of(answer: ChatCompletion | Completion) -> CompletionUsage:
    assert answer.usage is not None
    return answer.usage


# -- chat completions -------------------------------------------------------------------------------------


async def test_a_chat_completion_has_the_requested_tokens(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"ewsjf_output_tokens": 7}
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].finish_reason == "stop"
    assert usage_of(answer).completion_tokens == 7
    assert len((answer.choices[0].message.content or "").split()) == 7
    assert usage_of(answer).total_tokens == usage_of(answer).prompt_tokens + 7


async def test_max_tokens_cuts_an_answer_with_the_reason_length(engine: Served) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = await engine.sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"ewsjf_output_tokens": 50, **limit}
        )
        assert (answer.choices[0].finish_reason, usage_of(answer).completion_tokens) == ("length", 5)


async def test_a_stream_brings_one_token_per_chunk_and_the_usage_last(engine: Served) -> None:
    stream = await engine.sdk.chat.completions.create(
        model="alias",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ewsjf_output_tokens": 12},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert len("".join(text or "" for text in texts).split()) == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert {chunk.model for chunk in chunks} == {"alias"}


async def test_a_stream_has_no_usage_unless_requested_and_ends_with_done(engine: Served) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "ewsjf_output_tokens": 3}
    answer = await engine.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events[:-1])


async def test_choices_share_their_prompt(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "word " * 200}],
        n=3,
        extra_body={"ewsjf_output_tokens": 4},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert usage_of(answer).completion_tokens == 12
    assert 200 < usage_of(answer).prompt_tokens < 400
    metrics = await engine.metrics()
    assert metrics["vllm:prefix_cache_hits_total"] > 400


async def test_a_repeated_prompt_comes_from_the_cache(engine: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "the same words again " * 50}]
    counts = []
    for _ in range(2):
        answer = await engine.sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        usage = usage_of(answer)
        assert usage.prompt_tokens_details is not None
        counts.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens))
    (first, _), (second, prompt_tokens) = counts
    assert first == 0
    assert second == prompt_tokens // 16 * 16


async def test_equal_prompts_have_equal_answers_and_others_have_others(engine: Served) -> None:
    async def answer(content: str) -> str | None:
        messages: Any = [{"role": "user", "content": content}]
        made = await engine.sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
        return made.choices[0].message.content

    assert await answer("a") == await answer("a")
    assert await answer("a") != await answer("b")


async def test_drawn_lengths_repeat_with_the_seed_and_respect_the_limit() -> None:
    async def lengths(seed: int) -> list[int]:
        settings = EmulatedEngineSettings(mean_output_tokens=20, speed_up=20, seed=seed)
        async with served(settings) as it:
            answers = [
                await it.sdk.chat.completions.create(model="emulated", messages=MESSAGES, max_tokens=40)
                for _ in range(6)
            ]
        return [usage_of(answer).completion_tokens for answer in answers]

    first = await lengths(1)
    assert first == await lengths(1)
    assert len(set(first)) > 1
    assert all(1 <= tokens <= 40 for tokens in first)


# -- the other endpoints ----------------------------------------------------------------------------------


async def test_completions_take_text_or_token_ids_alone_or_in_lists(engine: Served) -> None:
    for prompt, prompts, tokens in (
        ("x" * 370, 1, 100),
        ([1, 2, 3], 1, 3),
        (["x" * 37, "y" * 37], 2, 20),
        ([[1, 2], [3, 4, 5]], 2, 5),
    ):
        answer = await engine.sdk.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert len(answer.choices) == prompts
        usage = usage_of(answer)
        assert (usage.prompt_tokens, usage.completion_tokens) == (tokens, 2 * prompts)


async def test_a_completion_streams_and_is_16_tokens_at_most_by_default(engine: Served) -> None:
    stream = await engine.sdk.completions.create(
        model="tiny", prompt="tell", stream=True, extra_body={"ewsjf_output_tokens": 90}
    )
    chunks = [chunk async for chunk in stream]
    assert len("".join(chunk.choices[0].text for chunk in chunks).split()) == 16
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_response_is_whole_and_streams_with_its_events_in_order(engine: Served) -> None:
    whole = await engine.sdk.responses.create(
        model="tiny", input="hello", extra_body={"ewsjf_output_tokens": 5}
    )
    assert (whole.status, len(whole.output_text.split())) == ("completed", 5)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 5

    stream = await engine.sdk.responses.create(
        model="tiny", input=[{"role": "user", "content": "hello"}], max_output_tokens=4, stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == last.response.output_text
    assert len(deltas.split()) == 4


async def test_the_client_may_name_a_response(engine: Served) -> None:
    for body, name in (({"request_id": "resp_mine"}, "resp_mine"), ({}, "resp_[0-9a-f]{32}")):
        named = await engine.sdk.responses.create(model="tiny", input="x", extra_body=body)
        assert re.fullmatch(name, named.id)


async def test_a_response_is_announced_before_anything_is_computed(engine: Served) -> None:
    """As in vLLM: these events say nothing about the prefill."""
    body = {"model": "tiny", "input": "word " * 1_500, "stream": True, "max_output_tokens": 2}
    async with engine.http.stream("POST", "/v1/responses", json=body) as answer:
        pieces = [piece async for piece in answer.aiter_bytes()]
    assert b"event: response.in_progress" in pieces[0]
    assert b"response.output_item.added" not in pieces[0]
    assert b"response.output_item.added" in b"".join(pieces)


async def test_embeddings_are_unit_vectors_that_follow_their_input(engine: Served) -> None:
    answer = await engine.sdk.embeddings.create(model="tiny", input=["one", "two", "one"])
    vectors = [item.embedding for item in answer.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert sum(value * value for value in vectors[0]) == pytest.approx(1.0)
    assert answer.usage.prompt_tokens == 3
    # The SDK requests base64 by default; plain numbers must be equal.
    plain = await engine.sdk.embeddings.create(model="tiny", input=["one"], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)


async def test_models_tokenize_and_health_answer(engine: Served) -> None:
    models = await engine.sdk.models.list()
    assert [model.id for model in models.data] == ["tiny", "alias"]
    assert models.data[0].model_extra is not None
    assert models.data[0].model_extra["max_model_len"] == 8_192
    tokens = (await engine.http.post("/tokenize", json={"model": "tiny", "prompt": "x" * 37})).json()
    assert (tokens["count"], len(tokens["tokens"]), tokens["max_model_len"]) == (10, 10, 8_192)
    chat = (await engine.http.post("/tokenize", json={"messages": MESSAGES})).json()
    answer = await engine.sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert chat["count"] == usage_of(answer).prompt_tokens
    assert (await engine.http.get("/health")).status_code == 200


async def test_pictures_count_as_tokens_and_not_as_text(engine: Served) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    content: Any = [{"type": "text", "text": "what is this"}, picture]
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1
    )
    assert 256 < usage_of(answer).prompt_tokens < 300


# -- cancellation, load, life cycle -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine_within_a_second(stream: bool) -> None:
    async with served(EmulatedEngineSettings()) as it:
        body = {"prompt": "x", "n": 3, "max_tokens": 8_000, "ignore_eos": True, "stream": stream}
        request = asyncio.create_task(it.http.post("/v1/completions", json=body))
        await until(lambda: it.is_running(3))
        request.cancel()
        await until(lambda: it.is_running(0), timeout_s=1.0)
        assert (await it.engine.load()).kv_usage_ratio == 0.0


async def test_a_client_that_disconnects_in_the_queue_is_unsubscribed() -> None:
    async with served(EmulatedEngineSettings(max_num_seqs=1)) as it:
        body = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True}
        running = asyncio.create_task(it.http.post("/v1/completions", json=body))
        await until(lambda: it.is_running(1))
        waiting = asyncio.create_task(it.http.post("/v1/completions", json=body))
        await until(lambda: it.is_waiting(1))
        waiting.cancel()
        await until(lambda: it.is_waiting(0), timeout_s=1.0)
        assert await it.is_running(1)
        running.cancel()


async def test_under_a_tiny_cache_sequences_are_preempted_and_every_answer_is_whole() -> None:
    settings = EmulatedEngineSettings(
        max_model_len=512, kv_tokens=640, max_num_batched_tokens=256, speed_up=10
    )
    async with served(settings) as it:

        async def ask(index: int) -> tuple[int, int]:
            stream = await it.sdk.completions.create(
                model="emulated",
                prompt=[index] * 60,
                stream=True,
                stream_options={"include_usage": True},
                max_tokens=150,
                extra_body={"ewsjf_output_tokens": 100 + index},
            )
            text, counted = "", 0
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
                counted = chunk.usage.completion_tokens if chunk.usage else counted
            return len(text.split()), counted

        answers = await asyncio.gather(*(ask(index) for index in range(12)))
        assert answers == [(100 + index, 100 + index) for index in range(12)]
        load = await it.engine.load()
        assert (load.running, load.waiting, load.kv_usage_ratio) == (0, 0, 0.0)
        assert (await it.metrics())["vllm:num_preemptions_total"] > 0


async def test_metrics_count_served_requests(engine: Served) -> None:
    for _ in range(3):
        await engine.sdk.completions.create(
            model="tiny", prompt=[1] * 40, max_tokens=10, extra_body={"ignore_eos": True}
        )
    metrics = await engine.metrics()
    assert metrics["vllm:generation_tokens_total"] == 30
    assert metrics["vllm:inter_token_latency_seconds_count"] == 27
    assert metrics["vllm:inter_token_latency_seconds_bucket|+Inf"] == 27
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["vllm:prefix_cache_queries_total"] == 120
    assert metrics["vllm:iteration_tokens_total_count"] == 30
    text = (await engine.http.get("/metrics")).text
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in text


async def test_a_reader_of_vllms_metrics_reads_ours(engine: Served) -> None:
    await engine.sdk.completions.create(
        model="tiny", prompt=[1] * 40, max_tokens=10, extra_body={"ignore_eos": True}
    )
    reading = read((await engine.http.get("/metrics")).content)
    assert (reading.waiting, reading.running, reading.kv_usage_ratio) == (0, 0, 0.0)
    assert (reading.kv_tokens, reading.token_gaps) == (32_768, 9)
    assert reading.token_gaps_s


async def test_the_load_shows_waiting_running_and_time_per_token() -> None:
    async with served(EmulatedEngineSettings(max_num_seqs=2)) as it:
        assert (await it.engine.load()).tpot_s is None
        body = {"prompt": "x", "n": 5, "max_tokens": 400, "ignore_eos": True}
        request = asyncio.create_task(it.http.post("/v1/completions", json=body))
        await until(lambda: it.is_waiting(3))
        await asyncio.sleep(0.6)
        load = await it.engine.load()
        assert (load.waiting, load.running) == (3, 2)
        assert 0.0 < load.kv_usage_ratio < 1.0
        # The profile's TPOT for two sequences is 4.2 ms. A busy machine wakes late and catches up 0.1 s.
        assert load.tpot_s is not None
        assert 0.0035 < load.tpot_s < 0.1
        request.cancel()


async def test_an_engine_that_stops_answers_its_clients_with_an_error() -> None:
    async with served(EmulatedEngineSettings()) as it:
        body = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True}
        whole = asyncio.create_task(it.http.post("/v1/completions", json=body))
        stream = asyncio.create_task(it.http.post("/v1/completions", json={**body, "stream": True}))
        await until(lambda: it.is_running(2))
        await it.engine.stop()
        assert (await whole).status_code == 500
        last, done = (await stream).text.strip().split("\n\n")[-2:]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
        assert (await it.http.get("/health")).status_code == 503
        assert (await it.http.post("/v1/completions", json=body)).status_code == 500
        with pytest.raises(EngineError):
            await it.engine.check_health()


async def test_the_engine_satisfies_the_protocol_and_returns_its_limits() -> None:
    engine: Engine = EmulatedEngine(EmulatedEngineSettings(kv_tokens=10_000, max_model_len=4_000))
    with pytest.raises(EngineError, match="has not been started"):
        await engine.check_health()
    limits = await engine.start()
    assert (limits.max_model_len, limits.kv_tokens, limits.max_num_seqs) == (4_000, 10_000, 16)
    await engine.check_health()
    assert repr(engine).startswith("<EmulatedEngine profile=laptop <EngineDriver open=0 ")
    await engine.stop()
    with pytest.raises(EngineError, match="has stopped"):
        await engine.check_health()


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"speed_up": 0}, "speed_up must be positive, got 0"),
        ({"served_model_names": ()}, "at least one name"),
        ({"output_tokens_sigma": -1}, "got -1"),
    ],
)
def test_settings_out_of_range_are_rejected(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        EmulatedEngineSettings(**values)


def test_contradictory_settings_are_rejected_with_the_profile() -> None:
    with pytest.raises(SettingsError, match="profile laptop: max_model_len"):
        EmulatedEngine(EmulatedEngineSettings(max_model_len=100_000))


def test_settings_come_from_plain_data_and_unknown_keys_are_named() -> None:
    adapter = TypeAdapter(EmulatedEngineSettings)
    read = adapter.validate_python({"served_model_names": ["a"], "scheduling_policy": "priority"})
    assert read.scheduling_policy is SchedulingPolicy.PRIORITY
    with pytest.raises(ValidationError, match="speedup"):
        adapter.validate_python({"speedup": 3})


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("kept", [1, 6])
async def test_an_answer_is_continued_from_its_token_ids(engine: Served, path: str, kept: int) -> None:
    is_chat = path == "chat/completions"
    content: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": "Once upon"}
    asked = {"model": "tiny", "ignore_eos": True, "stream": True, "return_token_ids": True, **content}

    async def streamed(**changes: Any) -> tuple[list[int], list[int], str]:
        """Return the ids of the prompt and of the answer, and its text."""
        answer = await engine.http.post(f"/v1/{path}", json={**asked, **changes})
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        choices = [chunk["choices"][0] for chunk in chunks]
        prompt = chunks[0]["prompt_token_ids"] if is_chat else choices[0]["prompt_token_ids"]
        ids = [number for choice in choices for number in choice.get("token_ids", ())]
        texts = [choice["delta"]["content"] if is_chat else choice["text"] for choice in choices]
        return prompt, ids, "".join(texts)

    prompt, ids, text = await streamed(max_tokens=10)
    begun = await streamed(max_tokens=kept)
    assert begun[:2] == (prompt, ids[:kept])
    so_far = [*prompt, *ids[:kept]]
    more = {"kv_transfer_params": {"prompt_token_ids": so_far}} if is_chat else {"prompt": so_far}
    found = await streamed(max_tokens=10 - kept, **more)
    assert found == (so_far, ids[kept:], text.removeprefix(begun[2]))
    assert begun[2] + found[2] == text


# -- rejections: context limits in vLLM's words, invalid bodies, unsupported features ---------------------


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


# -- tool calls: demanded ones are made, without arguments ------------------------------------------------

QUESTION: list[Any] = [{"role": "user", "content": "Will I need an umbrella?"}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "name"), [("required", "clock"), (NAMED, "get_weather")])
async def test_a_demanded_call_is_made_whole_and_as_a_stream(engine: Served, choice: Any, name: str) -> None:
    request: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [CLOCK, WEATHER],
        "tool_choice": choice,
        "max_tokens": 20,
    }
    whole = await engine.sdk.chat.completions.create(**request)
    async with engine.sdk.chat.completions.stream(**request) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == (name, "{}")
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_an_answer_that_need_not_call_a_tool_is_text(engine: Served, choice: Any) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=20
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


async def test_responses_call_the_function_too_whole_and_as_a_stream(engine: Served) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": {}, "strict": True}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        request: Any = {"model": "tiny", "input": "Umbrella?", "tools": [tool], "tool_choice": choice}
        whole = await engine.sdk.responses.create(**request)
        (item,) = whole.output
        assert item.type == "function_call"
        assert (item.name, item.arguments, item.status) == ("get_weather", "{}", "completed")
        stream = await engine.sdk.responses.create(**request, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[2:] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
