"""Baseline forwarder: same structure and event loop as the gateway, without any decision.

It parses requests and answers with httptools, and buffers a body completely, as a gateway must that may send
it twice. It forwards the body over a kept-alive connection to the next engine.
"""

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import cast

import httptools
import uvloop

_HOST = "127.0.0.1"


class _Engine(asyncio.Protocol):
    """Engine connection; idle ones wait in the list of their port."""

    def __init__(self, idle: "list[_Engine]") -> None:
        self._idle = idle
        self._client: _Client | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._ended = False
        self.transport: asyncio.Transport | None = None

    def send(self, client: "_Client", request: Sequence[bytes]) -> None:
        self._client = client
        self._ended = False
        assert self.transport is not None
        self.transport.writelines(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop passes it
        if self in self._idle:
            self._idle.remove(self)
        if self._client is not None:
            self._client.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        client = self._client
        assert client is not None
        client.write(data)
        if self._ended:
            self._client = None
            self._idle.append(self)

    def on_message_complete(self) -> None:
        self._ended = True


class _Client(asyncio.Protocol):
    """Client connection, with one request at a time."""

    def __init__(self, engines: Iterator[int], idle: dict[int, list[_Engine]]) -> None:
        self._engines = engines
        self._idle = idle
        self._parser = httptools.HttpRequestParser(self)
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: list[bytes] = []
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append(b"%s: %s\r\n" % (name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        head = b"%s %s HTTP/1.1\r\n%s\r\n" % (self._parser.get_method(), self._url, b"".join(self._headers))
        request = [head, *self._body]
        self._begin()
        port = next(self._engines)
        idle = self._idle[port]
        if idle:
            idle.pop().send(self, request)
        else:
            self._opening = asyncio.ensure_future(self._open(port, request))

    async def _open(self, port: int, request: Sequence[bytes]) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(lambda: _Engine(self._idle[port]), _HOST, port)
        engine.send(self, request)


async def _serve(port: int, engines: Sequence[int]) -> None:
    turns = itertools.cycle(engines)
    idle: dict[int, list[_Engine]] = {one: [] for one in engines}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(turns, idle), _HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), [int(one) for one in sys.argv[2:]]))
