"""Valid and damaged requests on one connection: the HTTP server and h11 must agree on what was requested."""

import asyncio
import contextlib
import random
import re

import h11
import pytest

from serve_app.engines.engine import Receive, Scope, Send
from tests.http_server import listening

_SEEDS = (
    b"GET /a?b=c HTTP/1.1\r\nhost: h\r\n\r\n",
    b"POST /b HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST /d HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nx-t: u\r\n\r\n",
    b"POST /e HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nhi",
)
_PIECES = (
    b"\r\n",
    b"\r\n folded",
    b"0",
    b"content-length: 3\r\n",
    b"transfer-encoding: chunked\r\n",
    b";name=value",
    b"x-trailer: 1\r\n",
    b"\x00",
    b" ",
    b"f" * 17,
    b"a" * 70_000,
)

_INTACT = re.compile(rb"(GET|POST) \S+ HTTP/1\.1\r\nhost: h\r")

# h11 rejects an empty line before a request, and these fields in trailers, which the server drops.
_HARMLESS = re.compile(rb"\n0\r\n[^\r]*(content-length|transfer-encoding)|\n\r\n\r\n(GET|POST) /")

Requested = tuple[str, bytes, bytes]
"""Method, target and body of a request that arrived completely."""


def damaged(chance: random.Random) -> bytes:
    """Join one to three requests, and damage them in up to two places.

    Request lines and `host` stay intact: h11 is stricter there, and they do not frame anything.
    """
    stream = bytearray(b"".join(chance.choice(_SEEDS) for _ in range(chance.randint(1, 3))))
    for _ in range(chance.randint(0, 2)):
        intact = {at for found in _INTACT.finditer(stream) for at in range(found.start(), found.end())}
        at = chance.choice([at for at in range(len(stream) + 1) if at not in intact])
        match chance.randrange(3):
            case 0:
                stream[at:at] = chance.choice(_PIECES)
            case 1:
                del stream[
                    at : min(
                        at + chance.randint(1, 4), min((b for b in intact if b > at), default=len(stream))
                    )
                ]
            case _ if at < len(stream):
                stream[at] ^= 1 << chance.randrange(8)
    return bytes(stream)


def by_h11(stream: bytes) -> list[Requested]:
    """Return the requests that h11 reads until the first error."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=10 * len(stream) + 1)
    connection.receive_data(stream)
    connection.receive_data(b"")
    found: list[Requested] = []
    request, body = h11.Request(method="GET", target="/", headers=[("host", "h")]), b""
    with contextlib.suppress(h11.RemoteProtocolError, h11.LocalProtocolError):
        while True:
            match connection.next_event():
                case h11.Request() as begun:
                    request, body = begun, b""
                case h11.Data(data=data):
                    body += bytes(data)
                case h11.EndOfMessage():
                    found.append((request.method.decode(), bytes(request.target), body))
                    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                    connection.start_next_cycle()
                case h11.InformationalResponse():
                    pass
                case _:
                    break
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_requests_that_the_server_passes_on_are_those_that_h11_reads(seed: int) -> None:
    chance = random.Random(seed)
    requested: list[Requested] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, message = b"", await receive()
        while message["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                query = b"?" + scope["query_string"] if scope["query_string"] else b""
                requested.append((scope["method"], scope["raw_path"] + query, body))
                break
            message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    differ, passed = [], 0
    async with listening(app) as port, asyncio.timeout(60):
        for _ in range(300):
            stream = damaged(chance)
            requested.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                for piece in _pieces(stream, chance):
                    writer.write(piece)
                    await writer.drain()
                writer.write_eof()
                await reader.read()
            writer.close()
            # The server may be stricter: it may stop earlier, and nowhere read another request.
            theirs = by_h11(stream)
            passed += len(requested)
            if requested != theirs[: len(requested)] and not _HARMLESS.search(stream):
                differ.append((stream[:400], list(requested), theirs))
    assert differ == []
    assert passed > 200


def _pieces(stream: bytes, chance: random.Random) -> list[bytes]:
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randint(0, 3)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
