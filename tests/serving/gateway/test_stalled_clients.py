"""Clients that stop reading: engine capacity that they hold, and for how long."""

import asyncio
import json
import socket
from typing import Any

import pytest

from serve_app.engines.engine import Scope, Send
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.gateway import UpstreamSettings

from .builders import (
    chat,
    eventually,
    send_event,
    start_stream,
    usage_json,
)
from .conftest import Stage, staged

CHAT = "/v1/chat/completions"
PIECE = {"choices": [{"index": 0, "delta": {"content": "x" * 1_000}}]}


async def silent_client(stage: Stage, document: dict[str, Any]) -> socket.socket:
    """Send a request over a connection with small buffers, and read nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", stage.port))
    body = json.dumps(document).encode()
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    await loop.sock_sendall(sock, head + body)
    return sock


@pytest.mark.parametrize(("pieces", "outcome"), [(3, Outcome.COMPLETED), (300, Outcome.CANCELLED)])
async def test_a_client_that_reads_nothing_holds_no_slot(pieces: int, outcome: Outcome) -> None:
    """Holds whether or not the rest of the answer fits the gateway's buffers."""

    async def answers(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        for _ in range(pieces):
            event = f"data: {json.dumps(PIECE)}\n\n".encode() * 100
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send_event(send, {"choices": [], "usage": usage_json(7, 3_000)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async with staged(upstream=UpstreamSettings(stalled_client_timeout_s=1.0)) as stage:
        stage.engine.answers.append(answers)
        sock = await silent_client(stage, chat(stream=True))
        await eventually(lambda: stage.engine.bodies)
        await eventually(stage.dispatcher.outcomes, within_s=8)
        assert stage.dispatcher.outcomes() == [outcome]
        await eventually(lambda: stage.engine.running == 0)
        await eventually(lambda: stage.gateway.in_flight == 0)
        sock.close()


async def test_the_place_is_free_when_the_engine_has_finished_and_the_rest_is_still_delivered() -> None:
    """The limit is two minutes, so the limit is not what ends the request."""
    text = f"data: {json.dumps(PIECE)}\n\n".encode()
    goes_on = asyncio.Event()

    async def answers(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        await send({"type": "http.response.body", "body": text, "more_body": True})
        await goes_on.wait()
        await send({"type": "http.response.body", "body": text * 3, "more_body": True})
        await send_event(send, {"choices": [], "usage": usage_json(7, 3_000)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async with staged() as stage:
        stage.engine.answers.append(answers)
        reads = asyncio.Event()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            # Simulates a server whose buffers are full after the first piece.
            sent.append(message)
            if message.get("body") == text:
                goes_on.set()
                await reads.wait()

        task = asyncio.create_task(_call(stage, send))
        await eventually(stage.dispatcher.outcomes)
        assert not reads.is_set()
        usage = Usage(prompt_tokens=7, output_tokens=3_000)
        assert stage.dispatcher.events[-1] == ("finished", Outcome.COMPLETED, usage)
        reads.set()
        await task
        body = b"".join(message.get("body", b"") for message in sent)
        assert body == text * 4 + b"data: [DONE]\n\n"
        assert [message["more_body"] for message in sent[1:]] == [True, False]


async def test_an_engine_lost_while_its_client_does_not_read_frees_its_slot_and_is_reported() -> None:
    text = f"data: {json.dumps(PIECE)}\n\n".encode()
    dies = asyncio.Event()

    async def answers(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await start_stream(send)
        await send({"type": "http.response.body", "body": text, "more_body": True})
        await dies.wait()
        raise ConnectionError("the engine died")

    async with staged() as stage:
        stage.engine.answers.append(answers)
        reads = asyncio.Event()
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body") == text:
                dies.set()
                await reads.wait()

        task = asyncio.create_task(_call(stage, send))
        await eventually(stage.dispatcher.outcomes)
        assert stage.dispatcher.outcomes() == [Outcome.FAILED]
        reads.set()
        await task
        assert b"the engine failed during its answer" in sent[-1]["body"]


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/nowhere"])
async def test_no_send_may_take_for_ever(path: str) -> None:
    """Covers documents, whole answers and rejections."""
    async with staged(upstream=UpstreamSettings(stalled_client_timeout_s=0.3)) as stage:

        async def send(message: Any) -> None:
            await asyncio.sleep(3_600)

        await asyncio.wait_for(_call(stage, send, path), 10)
        assert stage.gateway.in_flight == 0
        assert not stage.dispatcher.held


async def _call(stage: Stage, send: Any, path: str = CHAT) -> None:
    """Call the app as an ASGI server does for a connected client."""
    messages = [{"type": "http.request", "body": json.dumps(chat(stream=path == CHAT)).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.sleep(3_600)
        raise AssertionError

    method = "POST" if path == CHAT else "GET"
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    await stage.gateway(scope, receive, send)


async def test_a_client_that_does_not_read_its_comments_gets_no_answer_either() -> None:
    upstream = UpstreamSettings(stalled_client_timeout_s=0.3)
    async with staged(upstream=upstream, queue_comment_interval_s=0.05) as stage:
        stage.dispatcher.gate.clear()
        blocked: list[Any] = []

        async def send(message: Any) -> None:
            blocked.append(message)
            await asyncio.sleep(3_600)

        task = asyncio.create_task(_call(stage, send))
        await eventually(lambda: blocked)
        await asyncio.sleep(0.8)
        stage.dispatcher.gate.set()
        await asyncio.wait_for(task, 10)
        assert stage.dispatcher.outcomes() == [Outcome.CANCELLED]
        assert len(blocked) == 1
