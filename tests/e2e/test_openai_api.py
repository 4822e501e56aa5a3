"""OpenAI's SDK against the whole application: gateway, scheduler, replicas."""

import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.e2e.served import Served

# The first test of a session waits until the application has started.
pytestmark = pytest.mark.timeout(300)

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Say hello."}]
# About 3,000 tokens.
LONG: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Tell me of the old house. " * 450}]


@pytest.fixture
async def client(app: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_every_api_is_answered(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 20
    completion = await client.completions.create(model="demo", prompt="Once upon a time", max_tokens=10)
    assert completion.choices[0].text
    response = await client.responses.create(model="demo", input="Say hello.", max_output_tokens=20)
    assert response.output_text
    embedding = await client.embeddings.create(model="demo", input=["one", "two"], encoding_format="float")
    assert [bool(each.embedding) for each in embedding.data] == [True, True]


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


async def test_the_models_are_listed_with_their_aliases(client: openai.AsyncOpenAI) -> None:
    assert {model.id async for model in client.models.list()} == {"demo", "demo-alias"}
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


async def test_the_origin_in_the_settings_may_send_requests(app: Served) -> None:
    page = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
    async with httpx.AsyncClient() as http:
        preflight = await http.options(f"{app.url}/v1/chat/completions", headers=page)
    assert preflight.headers["access-control-allow-origin"] == page["origin"]
