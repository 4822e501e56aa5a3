"""What clients can do through a gateway before a real engine: a check for each cell of docs/clients.md."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from tests.serving.gateway.builders import FakeDispatcher, refusal, serving

MODEL = "m"
KEY = "sk-of-the-tests"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
LONG: Any = [{"role": "user", "content": "word " * 900}]
# Not among the fields that Anthropic's SDK names.
GREEDY = {"temperature": 0}


@dataclass
class Counter:
    """Clients of a gateway, and one that asks the engine itself.

    Attributes:
        dispatcher: the scheduler in between, which wrote down what the gateway told it.
    """

    dispatcher: FakeDispatcher
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    direct: httpx.AsyncClient
    front: httpx.AsyncClient

    @property
    def counted(self) -> Usage:
        """What the gateway read of the last answer's token counts."""
        kind, outcome, usage = self.dispatcher.events[-1]
        assert (kind, outcome) == ("finished", Outcome.COMPLETED)
        found: Usage = usage
        return found

    def let_be_too_long(self) -> None:
        """The next request is not sent again once the engine has found it too long."""
        self.dispatcher.script.extend([self.dispatcher.ports[0], refusal(Outcome.REJECTED_TOO_LONG)])

    def first_tokens(self) -> int:
        return self.dispatcher.names().count("first_token")


Check = Callable[[Counter], Awaitable[None]]


@asynccontextmanager
async def counter(engine_url: str) -> AsyncIterator[Counter]:
    port = httpx.URL(engine_url).port
    assert port is not None
    dispatcher = FakeDispatcher([port])
    models = (ServedModel(name=MODEL, max_model_len=512),)
    settings = GatewaySettings(models=models, keys=(ApiKey(tenant="t", key=KEY),))
    app = Gateway(settings, {MODEL: dispatcher}, "gw")
    async with serving(app) as front:
        url = f"http://127.0.0.1:{front}"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as first,
            anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as second,
            httpx.AsyncClient(base_url=engine_url, timeout=120) as direct,
            httpx.AsyncClient(base_url=url, timeout=120, headers={"x-api-key": KEY}) as own,
        ):
            yield Counter(dispatcher, first, second, direct, own)
    app.close()


async def openai_answers(at: Counter) -> None:
    answer = await at.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, temperature=0
    )
    assert answer.usage is not None
    assert at.counted.output_tokens == answer.usage.completion_tokens == 8
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    straight = (await at.direct.post("/v1/chat/completions", json=body)).json()
    assert answer.choices[0].message.content == straight["choices"][0]["message"]["content"]


async def openai_streams(at: Counter) -> None:
    before = at.first_tokens()
    stream = await at.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, stream=True
    )
    assert [chunk async for chunk in stream]
    assert at.first_tokens() == before + 1
    assert at.counted.output_tokens == 8


async def openai_hears_of_errors(at: Counter) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await at.openai.chat.completions.create(model="other", messages=QUESTION)
    at.let_be_too_long()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await at.openai.chat.completions.create(model=MODEL, messages=LONG)
    with pytest.raises(openai.AuthenticationError):
        await at.openai.with_options(api_key="wrong").models.list()


async def openai_lists_models(at: Counter) -> None:
    assert [model.id for model in (await at.openai.models.list()).data] == [MODEL]


async def anthropic_answers(at: Counter) -> None:
    message = await at.anthropic.messages.create(
        model=MODEL, messages=QUESTION, max_tokens=8, extra_body=GREEDY
    )
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    cached = message.usage.cache_read_input_tokens or 0
    assert at.counted.prompt_tokens == message.usage.input_tokens + cached
    assert at.counted.cached_tokens == cached
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    straight = (await at.direct.post("/v1/messages", json=body)).json()
    assert message.content[0].type == "text"
    assert message.content[0].text == straight["content"][0]["text"]


async def anthropic_streams(at: Counter) -> None:
    before = at.first_tokens()
    async with at.anthropic.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=8, extra_body=GREEDY
    ) as stream:
        text = "".join([part async for part in stream.text_stream])
        whole = await stream.get_final_message()
    assert whole.content[0].type == "text"
    assert whole.content[0].text == text
    assert at.first_tokens() == before + 1
    assert at.counted.output_tokens == whole.usage.output_tokens == 8


async def anthropic_counts_tokens(at: Counter) -> None:
    counted = await at.anthropic.messages.count_tokens(model=MODEL, messages=QUESTION)
    await at.anthropic.messages.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert counted.input_tokens == at.counted.prompt_tokens


async def anthropic_hears_of_errors(at: Counter) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here") as unknown:
        await at.anthropic.messages.create(model="other", messages=QUESTION, max_tokens=1)
    assert unknown.value.response.json()["error"]["type"] == "not_found_error"
    at.let_be_too_long()
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await at.anthropic.messages.create(model=MODEL, messages=LONG, max_tokens=9)
    # Of an engine: vLLM's own type of error is none of Anthropic's.
    for path, body in (
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "nobody", "content": "hi"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "nobody", "content": "hi"}]}),
    ):
        answer = await at.front.post(path, json={"model": MODEL, **body})
        error = answer.json()
        assert (answer.status_code, error["type"]) == (400, "error"), answer.text
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError):
        await at.anthropic.with_options(api_key="wrong").messages.create(
            model=MODEL, messages=QUESTION, max_tokens=1
        )


async def anthropic_lists_models(at: Counter) -> None:
    assert [model.id async for model in at.anthropic.models.list()] == [MODEL]


# Client and feature, as the table in the documentation names them.
CHECKS: dict[tuple[str, str], Check] = {
    ("`openai` (Python)", "answers"): openai_answers,
    ("`openai` (Python)", "streams"): openai_streams,
    ("`openai` (Python)", "errors"): openai_hears_of_errors,
    ("`openai` (Python)", "list of models"): openai_lists_models,
    ("`anthropic` (Python)", "answers"): anthropic_answers,
    ("`anthropic` (Python)", "streams"): anthropic_streams,
    ("`anthropic` (Python)", "counted tokens"): anthropic_counts_tokens,
    ("`anthropic` (Python)", "errors"): anthropic_hears_of_errors,
    ("`anthropic` (Python)", "list of models"): anthropic_lists_models,
}


async def small_questions(at: Counter) -> None:
    """What is asked of any replica, and the endpoints that a model of this kind does not have."""
    tokens = (await at.front.post("/tokenize", json={"model": MODEL, "prompt": "Hello there"})).json()
    text = await at.front.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
    assert text.json() == {"prompt": "Hello there"}
    assert (await at.front.get("/version")).json() == (await at.direct.get("/version")).json()
    for path, body in (("/rerank", {"query": "a", "documents": ["b"]}), ("/pooling", {"input": "a"})):
        answer = await at.front.post(path, json={"model": MODEL, **body})
        assert answer.status_code in {404, 400, 501}, answer.text
        assert answer.json()["error"]["message"]
