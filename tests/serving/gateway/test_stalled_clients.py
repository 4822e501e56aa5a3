"""Clients that stop reading: engine capacity that they hold, and for how long."""

import asyncio
import json
import socket
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.gateway import UpstreamSettings
from serve_app.serving.gateway.batches.runner import CollectingExchange
from tests.serving.channel.harness import wait_until

from .builders import call, chat, http_post, replies, streams, usage_json
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


class Blocked(CollectingExchange):
    """Client of a server whose buffers are full after the first piece of a stream."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__("/v1/chat/completions", json.dumps(document).encode())

    def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
        return super().write_chunk(piece, ends=ends) and len(self.pieces) > 1

    async def began(self) -> None:
        """Wait for the first piece."""
        await wait_until(lambda: self.pieces)


async def test_the_place_is_free_when_the_engine_has_finished_and_the_rest_is_still_delivered() -> None:
    """The limit is two minutes, so the limit is not what ends the request."""
    client = Blocked(chat(stream=True))
    async with running_gateway() as harness:
        harness.engine.answers.append(streams(PIECE, client.began, PIECE * 3, USAGE))
        await call(harness.gateway, exchange=client)
        usage = Usage(prompt_tokens=7, output_tokens=3_000)
        assert harness.dispatcher.events[-1] == ("finished", Outcome.COMPLETED, usage)
        assert b"".join(client.pieces) == PIECE * 4 + b"data: [DONE]\n\n"


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


async def test_an_engine_lost_while_its_client_does_not_read_frees_its_slot_and_is_reported() -> None:
    client = Blocked(chat(stream=True))
    async with running_gateway() as harness:
        harness.engine.answers.append(streams(PIECE, client.began, ConnectionError("the engine died")))
        await call(harness.gateway, exchange=client)
        assert harness.dispatcher.outcomes() == [Outcome.FAILED]
        assert b"the engine failed during its answer" in client.pieces[-1]
