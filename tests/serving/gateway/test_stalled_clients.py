"""Clients that stop reading: engine capacity that they hold, and for how long."""

import asyncio
import json
import socket
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.serving.gateway import UpstreamSettings
from tests.serving.channel.harness import wait_until

from .builders import chat, http_post, replies, streams, usage_json
from .conftest import GatewayHarness, running_gateway

PIECE = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'x' * 1_000}}]})}\n\n".encode()
USAGE = {"choices": [], "usage": usage_json(7, 3_000)}
WHOLE = {"choices": [], "usage": usage_json(7, 3_000), "text": "x" * 1_000_000 + "the end"}


async def silent_client(harness: GatewayHarness, document: dict[str, Any]) -> socket.socket:
    """Send a request over a connection with small buffers, and read nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", harness.port))
    await loop.sock_sendall(sock, http_post(document))
    return sock


async def read_all(sock: socket.socket) -> bytes:
    """Return what arrives until there is nothing for a while."""
    loop, received = asyncio.get_running_loop(), bytearray()
    while True:
        try:
            async with asyncio.timeout(0.5):
                piece = await loop.sock_recv(sock, 65_536)
        except TimeoutError:
            piece = b""
        if not piece:
            sock.close()
            return bytes(received)
        received += piece


@pytest.mark.parametrize(("pieces", "outcome"), [(3, Outcome.COMPLETED), (300, Outcome.CANCELLED)])
async def test_a_client_that_reads_nothing_holds_no_slot(pieces: int, outcome: Outcome) -> None:
    """Holds whether or not the rest of the answer fits the gateway's buffers."""
    async with running_gateway(upstream=UpstreamSettings(stalled_client_timeout_s=1.0)) as harness:
        harness.engine.answers.append(streams(*[PIECE * 100] * pieces, USAGE))
        sock = await silent_client(harness, chat(stream=True))
        await wait_until(lambda: harness.engine.bodies)
        await wait_until(harness.dispatcher.outcomes, within_s=8)
        assert harness.dispatcher.outcomes() == [outcome]
        await wait_until(lambda: harness.engine.running == 0)
        await wait_until(lambda: harness.gateway.in_flight == 0)
        sock.close()


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_last_piece_is_still_delivered_when_the_application_stops(streamed: bool) -> None:
    async with running_gateway() as harness:
        harness.engine.answers.append(streams(PIECE * 1_000, USAGE) if streamed else replies(200, WHOLE))
        sock = await silent_client(harness, chat(stream=streamed))
        await wait_until(harness.dispatcher.outcomes)
        stopping = asyncio.create_task(harness.gateway.drain(0.05, 1.0))
        await asyncio.sleep(0.2)
        answer = await read_all(sock)
        await stopping
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if streamed else b'the end"}')
