"""Clients that wait: one connection and one stream each, and another in the place of each answered one.

Each line on the standard input is `open PORT NUMBER PER_S`, `told` or `drop`. It prints what is open then,
and for `told` the milliseconds that the first bytes of the answers took from the engine, as JSON.
"""

import asyncio
import json
import re
import sys
import time

import uvloop

from experiments.gateways.held_engine import MODEL
from experiments.overhead.client import KEY

_FIRST = re.compile(rb'"content":"([0-9.]+)"')
_BODY = json.dumps(
    {
        "model": MODEL,
        "stream": True,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "Who waits longest? " * 5}],
    }
).encode()


class _Clients:
    def __init__(self) -> None:
        self.open: set[_Waiting] = set()
        self.first_ms: list[float] = []
        self.port = 0
        self.refusals: list[str] = []

    async def add(self, port: int, number: int, per_s: float) -> None:
        """Open so many more, evenly."""
        self.port = port
        loop = asyncio.get_running_loop()
        began = loop.time()
        for serial in range(number):
            await asyncio.sleep(max(0.0, began + serial / per_s - loop.time()))
            await self._open()

    def replace(self) -> None:
        """One was answered: another one waits in its place."""
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Waiting(self), "127.0.0.1", self.port)


class _Waiting(asyncio.Protocol):
    __slots__ = ("_clients", "_received", "_transport")

    def __init__(self, clients: _Clients) -> None:
        self._clients = clients
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # it can write
        self._clients.open.add(self)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n\r\n"
        )
        self._transport.write(head.encode() + _BODY)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._received += data
        found = _FIRST.search(self._received)
        if found is not None:
            self._clients.first_ms.append(1_000 * (now - float(found[1])))
            self.drop()
            self._clients.replace()
        elif not self._received.startswith(b"HTTP/1.1 200 "):
            self._clients.refusals.append(self._received.decode("latin-1"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop passes it
        self._clients.open.discard(self)

    def drop(self) -> None:
        self._clients.open.discard(self)
        self._transport.abort()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    clients = _Clients()
    while line := await reader.readline():
        match line.decode().split():
            case ["open", port, number, per_s]:
                await clients.add(int(port), int(number), float(per_s))
                # Whoever is refused is told by now.
                await asyncio.sleep(2.0)
            case ["told"]:
                clients.first_ms, told = [], clients.first_ms
            case ["drop"]:
                for each in tuple(clients.open):
                    each.drop()
        said = {"open": len(clients.open), "refusals": clients.refusals[:3]}
        print(json.dumps(said | {"first_ms": told} if line == b"told\n" else said), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve())
