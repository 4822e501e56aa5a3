"""Connections from HAProxy, over real sockets."""

import asyncio
import socket
from functools import partial

from tests.http_server import listening

from .builders import FakeDispatcher, InFront, gateway

ASKED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_an_idle_connection_stays_open_and_its_peer_is_watched() -> None:
    app = gateway(FakeDispatcher([]))
    made: list[socket.socket] = []

    class Watched(InFront):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            made.append(transport.get_extra_info("socket"))

    async with listening(app, protocol=partial(Watched, app), keep_alive_s=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(ASKED)
            async with asyncio.timeout(10):
                await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.1)
        assert len(made) == 1
        assert made[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        writer.close()
