"""OpenAI's SDK against the whole application: gateway, scheduler, replicas."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.e2e.served import Served, wait_for

# The first test of a session waits until the application has started.
pytestmark = pytest.mark.timeout(300)

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Say hello."}]
# About 3,000 tokens.
LONG: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Tell me of the old house. " * 450}]


@pytest.fixture
async def client(app: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_a_chat_completion_is_answered_with_its_usage(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_streamed_chat_arrives_in_chunks_and_ends_once(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=30, stream=True)
    came, reasons = [], []
    async for chunk in stream:
        came.append(time.monotonic())
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        # The gateway requests usage itself, and hides it from clients that did not request it.
        assert chunk.usage is None
    assert len(reasons) == 1
    assert came[-1] - came[0] > 0.03


async def test_a_stream_that_requests_its_usage_gets_it(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage]
    assert 1 <= usages[-1].completion_tokens <= 5


async def test_completions_responses_and_embeddings_are_answered(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(model="demo", prompt="Once upon a time", max_tokens=10)
    assert completion.choices[0].text
    response = await client.responses.create(model="demo", input="Say hello.", max_output_tokens=20)
    assert response.output_text
    embedding = await client.embeddings.create(model="demo", input=["one", "two"], encoding_format="float")
    assert len(embedding.data) == 2
    assert len(embedding.data[0].embedding) > 1


async def test_the_models_are_listed_with_their_aliases(client: openai.AsyncOpenAI) -> None:
    assert {model.id async for model in client.models.list()} == {"demo", "demo-alias"}
    assert (await client.models.retrieve("demo-alias")).id == "demo-alias"
    aliased = await client.chat.completions.create(model="demo-alias", messages=HELLO, max_tokens=3)
    assert aliased.choices[0].message.content


@pytest.mark.parametrize(("messages", "pool"), [(HELLO, "short"), (LONG, "long")])
async def test_the_token_budget_picks_the_pool(
    client: openai.AsyncOpenAI, messages: list[ChatCompletionUserMessageParam], pool: str
) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="demo", messages=messages, max_tokens=20, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-pool"] == pool
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-replica"]
    assert float(raw.headers["x-queue-wait-ms"]) >= 0
    assert int(raw.headers["x-estimated-tokens"]) > 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_too_long_for_the_short_engine_is_answered_by_the_long_pool(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """A short text that the emulated engine counts as 3,000 tokens, which no estimate can predict."""
    raw = await client.chat.completions.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=5, stream=stream, extra_body={"ewsjf_prompt_tokens": 3_000}
    )
    assert (raw.status_code, raw.headers["x-pool"]) == (200, "long")
    assert int(raw.headers["x-estimated-tokens"]) < 100


async def test_a_prompt_too_long_for_every_engine_is_rejected_in_the_engines_words(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as rejected:
        await client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=5, extra_body={"ewsjf_prompt_tokens": 100_000}
        )
    assert rejected.value.code == "context_length_exceeded"
    assert "maximum context length" in rejected.value.message


async def test_an_answer_has_one_request_id_even_when_the_client_gave_none(app: Served) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"{app.url}/v1/models")
    assert len(answer.headers.get_list("x-request-id")) == 1


async def test_errors_have_the_format_of_the_sdk(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="unknown", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=10
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=-1)


async def test_a_malformed_body_is_rejected_by_the_gateway(app: Served) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{app.url}/v1/chat/completions", content=b"{not json")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_large_header_and_a_large_body_pass(app: Served) -> None:
    body = {"model": "unknown", "messages": [{"role": "user", "content": "x" * 8_000_000}]}
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(
            f"{app.url}/v1/chat/completions", json=body, headers={"x-large": "a" * 12_000}
        )
    assert answer.status_code == 404


async def test_a_client_that_leaves_frees_its_engine_within_a_second(
    app: Served, client: openai.AsyncOpenAI
) -> None:
    await asyncio.to_thread(
        wait_for, lambda: app.metric("ewsjf_requests_in_flight") == 0, 10, "an idle fleet"
    )
    stream = await client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=1_800, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await asyncio.to_thread(
        wait_for, lambda: app.metric("ewsjf_replica_kv_usage_ratio") > 0, 5, "a busy engine"
    )
    left_at = time.monotonic()
    await stream.close()
    idle = ("ewsjf_requests_in_flight", "ewsjf_replica_kv_usage_ratio")
    await asyncio.to_thread(
        wait_for, lambda: all(app.metric(name) == 0 for name in idle), 5, "a freed engine"
    )
    # A second for the engine, plus time for its report and for polling on a busy machine.
    assert time.monotonic() - left_at < 2.5


async def test_no_wait_is_rejected_at_once_without_capacity(app: Served, client: openai.AsyncOpenAI) -> None:
    """Long answers fill the engines and their queues; then a `no-wait` request follows."""
    load = [
        asyncio.create_task(
            client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=400, extra_body={"ignore_eos": True}
            )
        )
        for _ in range(150)
    ]
    try:
        await asyncio.to_thread(wait_for, lambda: app.metric("ewsjf_requests_waiting") > 0, 15, "a queue")
        with pytest.raises(openai.RateLimitError) as rejected:
            await client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=400, extra_headers={"x-queue": "no-wait"}
            )
        assert int(rejected.value.response.headers["retry-after"]) >= 1
        answers = await asyncio.gather(*load)
        assert all(answer.usage and answer.usage.completion_tokens == 400 for answer in answers)
    finally:
        for task in load:
            task.cancel()


async def test_health_and_metrics_are_served_without_a_model(app: Served) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{app.url}/health")).status_code == 200
        assert (await http.get(f"{app.url}/ready")).json()["status"] == "ready"
        assert "ewsjf_requests_waiting" in (await http.get(f"{app.url}/metrics")).text
