"""Requests whose grant is revoked: they are stopped, wait again, and are continued or begin anew."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from serve_app.core.commands import Dispatch
from serve_app.core.events import DispatchFailure
from serve_app.engines.engine import Scope, Send
from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ChannelRequest, ReplicaAddress
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.settings import RouteSettings, ServedModel
from tests.serving.channel.harness import wait_until

from .builders import (
    MODEL,
    Engine,
    FakeDispatcher,
    call,
    chat,
    chunk,
    error_json,
    rejection,
    replies,
    reply_json,
    send_event,
    start_stream,
    streams,
    usage_json,
)
from .conftest import GatewayHarness, running_gateway
from .test_forward import connected
from .test_routes import served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BATCH = {"x-priority": "batch"}
PROMPT = [7, 8, 9]
WORDS = ["one", " two", " three", " four", " five"]
TEXT = "".join(WORDS)


class Continuing(Engine):
    """Engine that continues its answer from token ids, as vLLM does; the ids of its words are 0, 1, ...

    Attributes:
        pauses_at: word before which it waits until `go` is set, once; the number of words is the usage.
        ignores: it answers as an engine that does not know ids as prompt.
        rejects: it answers prompts of ids with 400.
        dies: the pause ends with a broken connection.
        context: its context limit, once.
    """

    def __init__(self, pauses_at: int | None = None) -> None:
        super().__init__()
        self.pauses_at = pauses_at
        self.go, self.paused = asyncio.Event(), asyncio.Event()
        self.ignores = self.rejects = self.dies = False
        self.context: int | None = None

    def body(self, number: int) -> Any:
        return json.loads(self.bodies[number])

    async def _stream(self, scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        is_chat = scope["path"] == CHAT
        ids = (
            (parsed.get("kv_transfer_params") or {}).get("prompt_token_ids") if is_chat else parsed["prompt"]
        )
        if not isinstance(ids, list) or self.ignores:
            ids = PROMPT
        elif self.rejects:
            await reply_json(send, 400, error_json("no such field"))
            return
        await start_stream(send)
        begin = len(ids) - len(PROMPT)
        limit = parsed.get("max_completion_tokens") or parsed.get("max_tokens") or len(WORDS)
        end = min(len(WORDS), begin + limit, (self.context or 1_000) - len(PROMPT))
        self.context = None
        prompt = {"prompt_token_ids": ids} if "return_token_ids" in parsed else {}
        common = {"id": f"answer-{len(self.bodies)}", "object": "chat.completion.chunk", "model": MODEL}
        if is_chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await send_event(send, {**common, "choices": [role], **prompt})
        for word in range(begin, end):
            await self._pause(word)
            own: dict[str, Any] = {"delta": {"content": WORDS[word]}} if is_chat else {"text": WORDS[word]}
            if not is_chat and word == begin:
                own |= prompt
            if prompt:
                own["token_ids"] = [word]
            reason = None if word + 1 < end else "stop" if end == len(WORDS) else "length"
            await send_event(send, {**common, "choices": [{"index": 0, **own, "finish_reason": reason}]})
        await self._pause(len(WORDS))
        await send_event(send, {**common, "choices": [], "usage": usage_json(len(ids), end - begin)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _whole(self, scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await self._pause(0)
        await super()._whole(scope, parsed, send)

    async def _pause(self, word: int) -> None:
        if word == self.pauses_at:
            self.pauses_at = None
            self.paused.set()
            await self.go.wait()
            if self.dies:
                raise ConnectionError("the engine died")


@pytest.fixture
async def engine() -> Continuing:
    return Continuing()


@pytest.fixture
async def harness(engine: Continuing) -> AsyncIterator[GatewayHarness]:
    dispatcher = FakeDispatcher([], names_responses=True)
    async with running_gateway(dispatcher, engine=engine) as made:
        yield made
        assert not dispatcher.in_flight
        assert made.gateway.in_flight == 0


def request_body(path: str = CHAT, **changes: Any) -> dict[str, Any]:
    return chat(**changes) if path == CHAT else {"model": MODEL, "prompt": "count", **changes}


async def uninterrupted(harness: GatewayHarness, path: str, **changes: Any) -> Any:
    """Return an answer without interruption, and forget it."""
    answer = (await harness.http.post(path, json=request_body(path, **changes), headers=BATCH)).json()
    harness.dispatcher.events.clear()
    return answer


async def revoked(
    harness: GatewayHarness, engine: Continuing, at: int, path: str = CHAT, times: int = 1, **changes: Any
) -> httpx.Response:
    """Send a batch request, and revoke it while its engine waits before a word."""
    engine.pauses_at = at
    engine.paused.clear()
    request = asyncio.create_task(harness.http.post(path, json=request_body(path, **changes), headers=BATCH))
    await engine.paused.wait()
    # Time for the words before the pause to arrive.
    await asyncio.sleep(0.05)
    for _ in range(times):
        revoke(harness)
    if at == len(WORDS):
        # Time to stop the request, which must not happen.
        await asyncio.sleep(0.05)
        engine.go.set()
    return await request


def revoke(harness: GatewayHarness) -> None:
    assert harness.dispatcher.revoke is not None
    harness.dispatcher.revoke()


def answer_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return {name: value for name, value in response.json().items() if name != "id"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": 4}])
@pytest.mark.parametrize("at", [0, 1, 3])
async def test_a_revoked_answer_is_that_of_an_uninterrupted_request(
    harness: GatewayHarness, engine: Continuing, path: str, limit: dict[str, Any], at: int
) -> None:
    whole = await uninterrupted(harness, path, **limit)
    response = await revoked(harness, engine, at, path, **limit)
    assert response.json().pop("id") == f"answer-{2 if at else 3}"
    whole.pop("id")
    assert answer_of(response) == whole
    assert whole["usage"]["completion_tokens"] == (4 if limit else len(WORDS))
    assert harness.dispatcher.generated_tokens == [at]
    assert harness.dispatcher.put_backs() == [DispatchFailure.REVOKED]
    assert engine.aborted == 1
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED]
    usage = harness.dispatcher.events[-1][2]
    assert (usage.prompt_tokens, usage.output_tokens) == (3, whole["usage"]["completion_tokens"])
    ids = (engine.body(2).get("kv_transfer_params") or engine.body(2)).get(
        "prompt_token_ids" if path == CHAT else "prompt"
    )
    assert ids == ([*PROMPT, *range(at)] if at else None if path == CHAT else "count")
    page = (await harness.http.get("/metrics")).text
    assert 'failure="revoked",' in page.partition("ewsjf_gateway_put_backs_total{")[2].partition("}")[0] + ","


async def test_a_request_is_revoked_at_each_of_its_grants(
    harness: GatewayHarness, engine: Continuing
) -> None:
    whole = await uninterrupted(harness, CHAT, max_tokens=9)
    engine.pauses_at = 1
    request = asyncio.create_task(harness.http.post(CHAT, json=request_body(max_tokens=9), headers=BATCH))
    for word in (2, 4, None):
        await engine.paused.wait()
        engine.paused.clear()
        await asyncio.sleep(0.05)
        engine.pauses_at = word
        revoke(harness)
    answer = answer_of(await request)
    whole.pop("id")
    assert answer == whole
    assert harness.dispatcher.generated_tokens == [1, 2, 4]
    assert [engine.body(number)["max_completion_tokens"] for number in (2, 3, 4)] == [8, 7, 5]


async def test_a_second_revocation_of_a_grant_changes_nothing(
    harness: GatewayHarness, engine: Continuing
) -> None:
    answer = answer_of(await revoked(harness, engine, 2, times=2))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert harness.dispatcher.generated_tokens == [2]


async def test_a_complete_answer_is_not_revoked(harness: GatewayHarness, engine: Continuing) -> None:
    answer = answer_of(await revoked(harness, engine, len(WORDS)))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert harness.dispatcher.names() == ["acquire", "first_token", "finished"]
    revoke(harness)
    assert harness.dispatcher.names() == ["acquire", "first_token", "finished"]


async def test_an_answer_that_begins_is_not_revoked(harness: GatewayHarness, engine: Continuing) -> None:
    class Revoking(CollectingExchange):
        """Client during whose answer the grant is revoked."""

        def start_response(self, *rest: Any) -> None:
            revoke(harness)
            super().start_response(*rest)

    tool = {"type": "function", "function": {"name": "f"}}
    body = json.dumps(request_body(tools=[tool])).encode()
    exchange = await call(harness.gateway, exchange=Revoking(CHAT, body, [(b"x-priority", b"batch")]))
    assert exchange.status == 200
    assert harness.dispatcher.names() == ["acquire", "finished"]
    assert len(engine.bodies) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"stop": "x"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"n": 1, "presence_penalty": 1},
    ],
)
async def test_what_depends_on_more_than_its_tokens_begins_anew(
    harness: GatewayHarness, engine: Continuing, changes: dict[str, Any]
) -> None:
    at = 0 if "tools" in changes else 2
    answer = answer_of(await revoked(harness, engine, at, **changes))
    assert answer["choices"][0]["message"]["content"]
    assert harness.dispatcher.generated_tokens == [0]
    assert engine.bodies[0] == engine.bodies[1]
    assert b"token_ids" not in engine.bodies[0]


@pytest.mark.parametrize("way", ["ignores", "rejects"])
async def test_an_engine_that_cannot_continue_begins_anew_by_the_same_grant(
    harness: GatewayHarness, engine: Continuing, way: str
) -> None:
    setattr(engine, way, True)
    answer = answer_of(await revoked(harness, engine, 2, max_tokens=5))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["usage"] == usage_json(3, 5)
    assert harness.dispatcher.names() == ["acquire", "first_token", "put_back", "first_token", "finished"]
    assert harness.dispatcher.put_backs() == [DispatchFailure.REVOKED]
    assert engine.body(1)["max_completion_tokens"] == 3
    assert "max_completion_tokens" not in engine.body(2)
    assert b"token_ids" not in engine.bodies[2]


async def test_an_engine_of_another_kind_begins_anew(harness: GatewayHarness, engine: Continuing) -> None:
    class Moved(FakeDispatcher):
        def put_back(self, *rest: Any) -> None:
            self.names_responses = False
            super().put_back(*rest)

    harness.dispatcher.__class__ = Moved
    answer = answer_of(await revoked(harness, engine, 2))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert b"token_ids" not in engine.bodies[1]


async def test_a_lost_answer_is_continued_elsewhere(harness: GatewayHarness, engine: Continuing) -> None:
    engine.dies, engine.pauses_at = True, 3
    engine.go.set()
    answer = answer_of(await harness.http.post(CHAT, json=request_body(), headers=BATCH))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["usage"] == usage_json(3, 5)
    assert harness.dispatcher.put_backs() == [DispatchFailure.LOST]
    assert harness.dispatcher.generated_tokens == [3]
    assert engine.body(1)["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 0, 1, 2]}


async def test_a_revocation_before_the_attempt_is_not_lost(
    harness: GatewayHarness, engine: Continuing
) -> None:
    class RevokedAtOnce(FakeDispatcher):
        def grant(self, request: ChannelRequest, dispatch: Dispatch, address: ReplicaAddress) -> None:
            super().grant(request, dispatch, address)
            if not self.generated_tokens:
                request.on_revocation()

    harness.dispatcher.__class__ = RevokedAtOnce
    answer = answer_of(await harness.http.post(CHAT, json=request_body(), headers=BATCH))
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert harness.dispatcher.put_backs() == [DispatchFailure.REVOKED]


@pytest.mark.parametrize("is_queued", [True, False])
async def test_a_client_that_leaves_after_a_revocation_is_forgotten(
    harness: GatewayHarness, engine: Continuing, is_queued: bool
) -> None:
    engine.pauses_at = 2
    _, writer = await connected(harness, request_body(priority=1))
    await engine.paused.wait()
    await wait_until(lambda: "first_token" in harness.dispatcher.names())
    harness.dispatcher.gate.clear()
    revoke(harness)
    if is_queued:
        await wait_until(lambda: harness.dispatcher.waiting == 1)
    writer.close()
    await wait_until(lambda: harness.gateway.in_flight == 0)
    await wait_until(lambda: engine.running == 0)
    assert harness.dispatcher.names() == ["acquire", "first_token", "put_back", "cancelled_in_queue"]


async def test_a_rejection_after_a_revocation_is_the_clients(
    harness: GatewayHarness, engine: Continuing
) -> None:
    harness.dispatcher.script.extend([*harness.dispatcher.ports, rejection(Outcome.EXPIRED, "it waited 9 s")])
    response = await revoked(harness, engine, 2)
    assert (response.status_code, response.json()["error"]["message"]) == (504, "it waited 9 s")
    assert harness.dispatcher.names() == ["acquire", "first_token", "put_back"]


async def test_another_model_begins_anew() -> None:
    route = RouteSettings(name="assistant", models={"stable": 1}, fallbacks=("new",))
    async with served(route) as models:
        stable, new = models.schedulers["stable"], models.schedulers["new"]
        stable.names_responses = new.names_responses = True
        stable.script.extend([*stable.ports, rejection(Outcome.REJECTED_QUEUE_FULL)])
        begun = {**chunk("one", token_ids=[0]), "prompt_token_ids": PROMPT}
        models.engines["stable"].answers.append(streams(begun, 3_600))
        request = asyncio.create_task(models.send_request(headers=BATCH))
        await wait_until(lambda: "first_token" in stable.names())
        await asyncio.sleep(0.05)
        assert stable.revoke is not None
        stable.revoke()
        answer = answer_of(await request)
        assert stable.generated_tokens == [1]
        (body,) = map(json.loads, models.engines["new"].bodies)
    assert answer["choices"][0]["message"]["content"].split() == ["w0", "w1", "w2", "w3"]
    assert body["return_token_ids"]
    assert not {"kv_transfer_params", "max_completion_tokens"} & body.keys()


async def test_answers_that_nobody_has_begun_to_read_are_revocable(harness: GatewayHarness) -> None:
    requests: list[tuple[str, dict[str, Any], dict[str, str], bool]] = [
        (CHAT, request_body(), BATCH, True),
        (CHAT, request_body(service_tier="flex"), {}, True),
        (COMPLETIONS, request_body(COMPLETIONS), BATCH, True),
        ("/v1/responses", {"model": MODEL, "input": "hello"}, BATCH, True),
        ("/v1/responses", {"model": MODEL, "input": "hello", "background": True}, BATCH, False),
        (CHAT, request_body(), {}, False),
        (CHAT, request_body(stream=True), BATCH, False),
        (CHAT, request_body(), {**BATCH, "x-queue": "no-wait"}, False),
        ("/v1/embeddings", {"model": MODEL, "input": "hello"}, BATCH, False),
        ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"}, BATCH, False),
    ]
    for path, body, headers, revocable in requests:
        await harness.http.post(path, json=body, headers=headers)
        submission = harness.dispatcher.submissions[-1]
        assert submission.revocable is (harness.dispatcher.revoke is not None) is revocable, (path, body)


# -- streams ----------------------------------------------------------------------------------------------


@pytest.fixture
async def resuming(engine: Continuing) -> AsyncIterator[GatewayHarness]:
    dispatcher = FakeDispatcher([], names_responses=True)
    models = (ServedModel(name=MODEL, resume_streams=True, max_model_len=100),)
    async with running_gateway(dispatcher, engine=engine, models=models) as made:
        yield made
        assert not dispatcher.in_flight
        assert made.gateway.in_flight == 0


async def stream(
    harness: GatewayHarness, path: str = CHAT, then: Callable[[str], Any] = lambda _: None, **changes: Any
) -> list[Any]:
    """Return the events of a stream; `then` is called with the text after each."""
    events: list[Any] = []
    async with harness.http.stream("POST", path, json=request_body(path, stream=True, **changes)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line[6:]
                events.append(data if data == "[DONE]" else json.loads(data))
                then(text_of(events))
    return events


def text_of(events: list[Any]) -> str:
    choices = [each["choices"][0] for each in events if each != "[DONE]" and each.get("choices")]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)


@pytest.mark.parametrize(
    ("path", "at"), [(CHAT, 0), (CHAT, 1), (CHAT, 3), (CHAT, 5), (COMPLETIONS, 1), (COMPLETIONS, 5)]
)
@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_continues_after_the_death_of_its_replica(
    resuming: GatewayHarness, engine: Continuing, path: str, at: int, usage: dict[str, Any]
) -> None:
    whole = await stream(resuming, path, **usage)
    resuming.dispatcher.events.clear()
    engine.dies, engine.pauses_at = True, at
    engine.go.set()
    events = await stream(resuming, path, **usage)
    ids = {each["id"] for each in events if each != "[DONE]"}
    assert ids == {"answer-2" if at else "answer-3"}
    assert without_ids(events) == without_ids(whole)
    assert text_of(events) == TEXT
    assert (events[-2].get("usage") is not None) is bool(usage)
    assert "token_ids" not in json.dumps(events)
    # The last word is generated again, because its event was held back.
    assert resuming.dispatcher.generated_tokens == [min(at, len(WORDS) - 1)]
    assert resuming.dispatcher.put_backs() == [DispatchFailure.LOST]
    assert resuming.dispatcher.outcomes() == [Outcome.COMPLETED]
    found = resuming.dispatcher.events[-1][2]
    assert (found.prompt_tokens, found.output_tokens) == (3, len(WORDS))


async def test_the_receipt_of_a_continued_stream_has_no_negative_stage(
    resuming: GatewayHarness, engine: Continuing
) -> None:
    engine.dies, engine.pauses_at = True, 3
    engine.go.set()
    wants = {"x-ewsjf-receipt": "1"}
    answer = await resuming.http.post(CHAT, json=request_body(stream=True), headers=wants)
    (receipt,) = re.findall(": ewsjf-receipt (.*)", answer.text)
    stages = json.loads(receipt)["stages_ms"]
    assert stages.keys() == {"gateway", "channel", "queue", "engine"}
    assert min(stages.values()) >= 0


def without_ids(events: list[Any]) -> list[Any]:
    return [each if each == "[DONE]" else {**each, "id": ""} for each in events]


@pytest.mark.parametrize("resumed", ["fallback", "first"])
async def test_whether_a_stream_continues_is_decided_by_the_model_that_serves_it(
    engine: Continuing, resumed: str
) -> None:
    dispatcher = FakeDispatcher([], names_responses=True)
    models = tuple(
        ServedModel(name=name, resume_streams=name == resumed, max_model_len=100)
        for name in ("first", "fallback")
    )
    route = RouteSettings(name=MODEL, models={"first": 1.0}, fallbacks=("fallback",))
    async with running_gateway(dispatcher, engine=engine, models=models, routes=(route,)) as harness:
        dispatcher.script.append(rejection(Outcome.REJECTED_QUEUE_FULL, "full"))
        engine.dies, engine.pauses_at = True, 2
        engine.go.set()
        events = await stream(harness)
    assert [each.spec.model for each in dispatcher.submissions] == ["first", "fallback"]
    assert [each.revocable for each in dispatcher.submissions] == [resumed == "first", resumed == "fallback"]
    assert (text_of(events) == TEXT) is (resumed == "fallback")
    assert dispatcher.outcomes()[-1] is (Outcome.COMPLETED if resumed == "fallback" else Outcome.FAILED)


async def test_a_stream_moves_when_its_grant_is_revoked(resuming: GatewayHarness, engine: Continuing) -> None:
    engine.pauses_at = 3

    def then(text: str) -> None:
        if text == "".join(WORDS[:3]) and not resuming.dispatcher.generated_tokens:
            revoke(resuming)

    assert text_of(await stream(resuming, then=then)) == TEXT
    assert resuming.dispatcher.put_backs() == [DispatchFailure.REVOKED]
    assert resuming.dispatcher.generated_tokens == [3]
    assert engine.aborted == 1


async def test_a_begun_stream_that_its_engine_cannot_continue_keeps_its_grant(
    resuming: GatewayHarness, engine: Continuing
) -> None:
    resuming.dispatcher.names_responses = False
    engine.pauses_at = 2

    def then(text: str) -> None:
        if text == "".join(WORDS[:2]):
            revoke(resuming)
            engine.go.set()

    assert text_of(await stream(resuming, then=then)) == TEXT
    assert resuming.dispatcher.put_backs() == []
    assert resuming.dispatcher.outcomes() == [Outcome.COMPLETED]


async def test_a_client_that_does_not_read_gets_no_more_of_a_stream_that_can_be_continued(
    resuming: GatewayHarness, engine: Continuing
) -> None:
    class Slow(CollectingExchange):
        """Client that reads the first piece, and further ones when it is told to."""

        reads = False

        @property
        def is_choked(self) -> bool:
            return bool(self.pieces) and not self.reads

    engine.pauses_at = 2
    client = Slow(CHAT, json.dumps(request_body(stream=True)).encode())
    request = asyncio.create_task(call(resuming.gateway, exchange=client))
    await engine.paused.wait()
    await wait_until(lambda: client.pieces)
    engine.paused.clear()
    engine.pauses_at = len(WORDS)
    engine.go.set()
    engine.go.clear()
    # The engine sends all words, and then waits before the end.
    await engine.paused.wait()
    await asyncio.sleep(0.05)
    assert len(client.pieces) == 1
    client.reads = True
    assert client.on_writable is not None
    client.on_writable()
    engine.go.set()
    await request
    body = b"".join(client.pieces).decode()
    assert text_of([json.loads(event) for event in body.split("data: ")[1:-1]]) == TEXT


async def test_a_revocation_while_the_client_does_not_read_loses_no_text(
    resuming: GatewayHarness, engine: Continuing
) -> None:
    class Slow(CollectingExchange):
        """Client that reads the first piece, and no further ones before a revocation."""

        @property
        def is_choked(self) -> bool:
            return bool(self.pieces) and not resuming.dispatcher.generated_tokens

    engine.pauses_at = 3
    client = Slow(CHAT, json.dumps(request_body(stream=True)).encode())
    request = asyncio.create_task(call(resuming.gateway, exchange=client))
    await engine.paused.wait()
    await wait_until(lambda: client.pieces)
    revoke(resuming)
    await wait_until(resuming.dispatcher.put_backs)
    engine.go.set()
    await request
    body = b"".join(client.pieces).decode()
    assert text_of([json.loads(event) for event in body.split("data: ")[1:-1]]) == TEXT
    assert client.response_complete


async def test_a_client_receives_only_what_is_not_generated_again(
    resuming: GatewayHarness, engine: Continuing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.serving.gateway.test_revocation.WORDS", ["one", ",", " two", "."])
    engine.pauses_at, seen = 2, []

    def then(text: str) -> None:
        seen.append(text)

    request = asyncio.create_task(stream(resuming, then=then))
    await engine.paused.wait()
    await wait_until(lambda: "one" in seen)
    await asyncio.sleep(0.05)
    assert seen[-1] == "one"
    engine.go.set()
    assert text_of(await request) == "one, two."


@pytest.mark.parametrize("way", ["ignores", "rejects"])
async def test_a_stream_that_cannot_be_continued_ends_with_an_error(
    resuming: GatewayHarness, engine: Continuing, way: str
) -> None:
    setattr(engine, way, True)
    engine.dies, engine.pauses_at = True, 2
    engine.go.set()
    *events, error = await stream(resuming)
    assert text_of(events) == "".join(WORDS[:2])
    assert "the answer is incomplete: the engine" in error["error"]["message"]
    assert resuming.dispatcher.outcomes() == [Outcome.FAILED]


@pytest.mark.parametrize("way", ["another engine", "an error", "no stream"])
@pytest.mark.parametrize("is_commented", [True, False])
async def test_a_begun_stream_whose_next_engine_streams_no_rest_ends_with_an_error(
    engine: Continuing, way: str, is_commented: bool
) -> None:
    class Moved(FakeDispatcher):
        def put_back(self, *rest: Any) -> None:
            self.names_responses = way != "another engine"
            super().put_back(*rest)

    dispatcher = Moved([], names_responses=True)
    models = (ServedModel(name=MODEL, resume_streams=True, max_model_len=100),)
    engine.dies, engine.pauses_at = True, 2
    async with running_gateway(
        dispatcher, engine=engine, models=models, queue_comment_interval_s=0.05
    ) as harness:
        if is_commented:
            dispatcher.gate.clear()
            asyncio.get_running_loop().call_later(0.2, dispatcher.gate.set)
        request = asyncio.create_task(stream(harness))
        await engine.paused.wait()
        if way != "another engine":
            # An engine's own error is retried once.
            answer = (
                replies(200, {}) if way == "no stream" else replies(500, error_json("out of memory", 500))
            )
            engine.answers.extend([answer, answer])
        engine.go.set()
        *events, error = await request
    assert text_of(events) == "".join(WORDS[:2])
    assert "the answer is incomplete: " in error["error"]["message"]
    assert "internal error" not in error["error"]["message"]
    assert dispatcher.outcomes() == [Outcome.FAILED]


async def test_a_stream_without_another_replica_ends_with_an_error(
    resuming: GatewayHarness, engine: Continuing
) -> None:
    resuming.dispatcher.script.extend(
        [*resuming.dispatcher.ports, rejection(Outcome.FAILED, "2 replicas were lost")]
    )
    engine.dies, engine.pauses_at = True, 2
    engine.go.set()
    *events, error = await stream(resuming)
    assert text_of(events) == "".join(WORDS[:2])
    assert "2 replicas were lost" in error["error"]["message"]


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"n": 2}]
)
async def test_other_streams_are_passed_on_as_usual(
    resuming: GatewayHarness, engine: Continuing, changes: dict[str, Any]
) -> None:
    engine.dies, engine.pauses_at = True, 2
    engine.go.set()
    *_, error = await stream(resuming, **changes)
    assert "the engine failed during its answer" in error["error"]["message"]
    assert b"return_token_ids" not in engine.bodies[0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_that_outgrows_its_engine_continues_on_another(
    resuming: GatewayHarness, engine: Continuing, path: str, is_streamed: bool
) -> None:
    resuming.dispatcher.max_model_len = engine.context = len(PROMPT) + 3
    if is_streamed:
        events = await stream(resuming, path)
        assert text_of(events) == TEXT
        reasons = [each["choices"][0].get("finish_reason") for each in events[:-1]]
        assert [each for each in reasons if each] == ["stop"]
    else:
        answer = await resuming.http.post(path, json=request_body(path), headers=BATCH)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert (choice.get("text") or choice["message"]["content"]) == TEXT
        assert answer.json()["usage"] == usage_json(3, 5)
    assert resuming.dispatcher.put_backs() == [DispatchFailure.TOO_LONG]
    # The last word came with the end.
    assert resuming.dispatcher.generated_tokens == [2]


@pytest.mark.parametrize(
    ("limit", "context", "stated"),
    [
        # The client's own limit, the engine's longest context, and another limit of the engine.
        (3, 6, 6),
        (None, 100, 100),
        (None, 6, 50),
        (None, 6, None),
    ],
)
async def test_an_answer_that_ends_at_another_limit_is_complete(
    resuming: GatewayHarness, engine: Continuing, limit: int | None, context: int, stated: int | None
) -> None:
    engine.context, resuming.dispatcher.max_model_len = context, stated
    changes: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    events = await stream(resuming, **changes)
    assert text_of(events) == "".join(WORDS[: 3 if context == 6 else 5])
    assert resuming.dispatcher.put_backs() == []
