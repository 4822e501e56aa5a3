"""Requests that fail, as clients see them over HTTP; `test_path` has every event in every state."""

import asyncio
from typing import Any

import openai
import pytest

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from tests.serving.channel.harness import wait_until

from .builders import MODEL, RawReplica, chat, chunk, error_json, http_post, rejection, replies, streams
from .conftest import GatewayHarness

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
TOO_LONG = "This model's maximum context length is 512 tokens. However, your prompt contains 900 input tokens"

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_lost_replica_is_replaced_transparently(harness: GatewayHarness) -> None:
    harness.dispatcher.script.extend([1, *harness.dispatcher.ports])
    answer = await harness.http.post(CHAT, json=chat())
    assert answer.status_code == 200
    assert answer.headers["x-replica"] == f"r{harness.dispatcher.ports[0]}"
    assert harness.dispatcher.put_backs() == [DispatchFailure.UNREACHABLE]
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED]


@pytest.mark.parametrize(
    "partial_answer",
    [
        b"",
        STREAM_HEAD,
        STREAM_HEAD + b"6\r\ndata: \r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
    ],
)
async def test_a_replica_that_dies_before_the_first_event_is_replaced_transparently(
    harness: GatewayHarness, partial_answer: bytes
) -> None:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        writer.write(partial_answer)
        await writer.drain()
        writer.close()

    async with RawReplica(script).listening() as port:
        harness.dispatcher.script.extend([port, *harness.dispatcher.ports])
        answer = await harness.http.post(CHAT, json=chat(stream=True))
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    assert harness.dispatcher.put_backs() == [DispatchFailure.LOST]
    assert harness.dispatcher.names().count("first_token") == 1


async def test_where_no_longer_pool_exists_the_client_gets_the_engines_own_message(
    harness: GatewayHarness,
) -> None:
    harness.engine.answers.append(replies(400, error_json(TOO_LONG, param="input_tokens")))
    harness.dispatcher.script.extend(
        [harness.dispatcher.ports[0], rejection(Outcome.REJECTED_TOO_LONG, "the scheduler's words")]
    )
    with pytest.raises(openai.BadRequestError) as caught:
        await harness.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input_tokens"
    assert TOO_LONG in caught.value.message
    assert harness.dispatcher.outcomes() == []


async def test_an_engine_that_dies_each_time_ends_with_the_schedulers_rejection(
    harness: GatewayHarness,
) -> None:
    port = harness.dispatcher.ports[0]
    dead = error_json("EngineCore encountered an issue. See stack trace", 500)
    harness.engine.answers.extend([replies(500, dead)] * 2)
    harness.dispatcher.script.extend([port, port, rejection(Outcome.FAILED)])
    with pytest.raises(openai.InternalServerError) as caught:
        await harness.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.status_code == 502
    assert "the engine answered 500: EngineCore encountered an issue" in caught.value.message
    assert harness.dispatcher.put_backs() == [DispatchFailure.LOST] * 2


@pytest.mark.parametrize(("status", "stream"), [(400, False), (404, True), (422, False), (501, False)])
async def test_an_engines_rejection_of_the_request_itself_is_passed_on(
    harness: GatewayHarness, status: int, stream: bool
) -> None:
    document = error_json("temperature must be positive", status)
    harness.engine.answers.append(replies(status, document, [(b"x-why", b"because")]))
    answer = await harness.http.post(CHAT, json=chat(stream=stream))
    assert (answer.status_code, answer.json(), answer.headers["x-why"]) == (status, document, "because")
    assert answer.headers["x-pool"] == "short"
    assert harness.dispatcher.outcomes() == [Outcome.REJECTED_INVALID]


@pytest.mark.parametrize(
    ("outcome", "status", "kind"),
    [
        (Outcome.REJECTED_QUEUE_FULL, 429, openai.RateLimitError),
        (Outcome.REJECTED_DEADLINE_UNMEETABLE, 429, openai.RateLimitError),
        (Outcome.REJECTED_NO_REPLICA, 503, openai.InternalServerError),
        (Outcome.EXPIRED, 504, openai.InternalServerError),
        (Outcome.REJECTED_TOO_LONG, 400, openai.BadRequestError),
    ],
)
async def test_the_schedulers_rejections_reach_the_client_with_a_time_to_retry(
    harness: GatewayHarness, outcome: Outcome, status: int, kind: type[openai.APIStatusError]
) -> None:
    harness.dispatcher.script.append(rejection(outcome, "too much", 2.2))
    with pytest.raises(kind) as caught:
        await harness.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    response = caught.value.response
    assert response.status_code == status
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2200")
    assert "too much" in caught.value.message
    assert float(response.headers["x-queue-wait-ms"]) >= 0
    assert harness.dispatcher.names() == ["acquire"]


async def test_the_sdk_raises_the_error_that_ends_a_broken_stream(harness: GatewayHarness) -> None:
    harness.engine.answers.append(streams(chunk("w0"), 0.02, ConnectionError("the engine dies")))
    stream = await harness.sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="incomplete") as caught:
        [chunk async for chunk in stream]
    assert caught.value.type == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_request_runs_stops_the_engine(
    harness: GatewayHarness, stream: bool
) -> None:
    harness.engine.token_delay_s = 0.05
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(http_post(chat(stream=stream, max_tokens=2000)))
    await wait_until(lambda: harness.engine.running == 1)
    if stream:
        await reader.readuntil(b"w1")
    writer.close()
    await wait_until(lambda: harness.engine.running == 0)
    await wait_until(lambda: harness.gateway.in_flight == 0)
    assert harness.engine.aborted == 1
    assert harness.dispatcher.outcomes() == [Outcome.CANCELLED]
    assert not harness.dispatcher.in_flight


async def test_a_fault_of_the_gateway_itself_still_concludes_the_request(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("serve_app.serving.gateway.path.counts_of", explode)
    answer = await harness.http.post(CHAT, json=chat())
    assert answer.status_code == 500
    assert harness.dispatcher.outcomes() == [Outcome.FAILED]
    assert harness.gateway.in_flight == 0


async def connected(
    harness: GatewayHarness, document: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a new connection, and return the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
    writer.write(http_post(document))
    return reader, writer


async def test_many_requests_with_every_kind_of_end_each_conclude_once(harness: GatewayHarness) -> None:
    harness.engine.token_delay_s = 0.002

    async def one(number: int) -> None:
        if number % 4 == 0:
            _, writer = await connected(harness, chat(stream=True, max_tokens=500))
            await asyncio.sleep(0.01 * (number % 7))
            writer.close()
        else:
            if number % 4 == 1:
                harness.engine.answers.append(replies(503, error_json("full", 503)))
            await harness.http.post(CHAT, json=chat(stream=number % 2 == 0))

    await asyncio.gather(*(one(number) for number in range(60)))
    await wait_until(lambda: harness.gateway.in_flight == 0)
    await wait_until(lambda: harness.engine.running == 0)
    assert not harness.dispatcher.in_flight
    names = harness.dispatcher.names()
    assert names.count("finished") + names.count("cancelled_in_queue") == names.count("acquire") == 60
