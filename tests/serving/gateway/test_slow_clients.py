"""Clients that send slowly, and streams that wait long, over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from serve_app.errors import Outcome
from serve_app.serving import http_server
from tests.serving.channel.harness import wait_until

from .builders import chat, error_json, replies
from .conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
HEAD = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" % CHAT.encode()


@pytest.mark.parametrize("pieces", [0, 5])
async def test_a_body_that_does_not_arrive_is_rejected_and_counts_as_in_flight(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REST_OF_BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.1)
    async with running_gateway(body_grace_s=0.5, min_body_bytes_per_s=100_000.0) as harness:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(HEAD)
        await wait_until(lambda: harness.gateway.in_flight == 1)
        # A few bytes now and then do not extend the timeout.
        for _ in range(pieces):
            await asyncio.sleep(0.05)
            writer.write(b" ")
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            assert b"body_too_slow" in await reader.read()
        writer.close()
        assert harness.gateway.in_flight == 0


async def test_a_long_body_that_arrives_at_a_fair_rate_is_accepted() -> None:
    async with running_gateway(body_grace_s=0.3, min_body_bytes_per_s=1_000.0) as harness:
        body = json.dumps(chat()).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(HEAD + b" " * (200_000 - len(body) - 10))
        await asyncio.sleep(0.8)
        writer.write(body + b" " * 10)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def waiting_stream(harness: GatewayHarness) -> asyncio.Task[str]:
    """Start a stream and wait for some comments."""

    async def read() -> str:
        async with harness.http.stream("POST", CHAT, json=chat(stream=True, max_tokens=3)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            return "".join([piece async for piece in answer.aiter_text()])

    reading = asyncio.create_task(read())
    await wait_until(lambda: harness.dispatcher.waiting == 1)
    await asyncio.sleep(0.5)
    return reading


@pytest.fixture
async def queued() -> AsyncIterator[GatewayHarness]:
    """Run a gateway whose scheduler queues every request, with a comment every 0.1 s."""
    async with running_gateway(queue_comment_interval_s=0.1) as harness:
        harness.dispatcher.gate.clear()
        yield harness


async def commented(harness: GatewayHarness) -> str:
    """Return the text of a stream that is served or rejected after some comments."""
    reading = await waiting_stream(harness)
    harness.dispatcher.gate.set()
    text = await reading
    assert harness.gateway.in_flight == 0
    comments, _, rest = text.partition("data: ")
    assert comments.count(": queued\n\n") >= 2
    assert ": queued" not in rest
    return "data: " + rest


async def test_a_stream_that_waits_gets_comments_and_then_its_answer(queued: GatewayHarness) -> None:
    text = await commented(queued)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    words = [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert words == ["w0 ", "w1 ", "w2 "]
    assert queued.dispatcher.outcomes() == [Outcome.COMPLETED]


async def test_an_engines_error_after_comments_is_an_event_as_well(queued: GatewayHarness) -> None:
    queued.engine.answers.append(replies(400, error_json("no such thing")))
    text = await commented(queued)
    assert json.loads(text.removeprefix("data: "))["error"]["message"] == "no such thing"
