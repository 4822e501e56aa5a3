"""Valid and damaged engine answers: the project's HTTP/1.1 client and h11 must agree."""

import asyncio
import random

import h11
import pytest

from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool, UpstreamSettings
from tests.serving.gateway.builders import RawReplica

_SEEDS = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-a: b\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end",
    b"HTTP/1.0 200 OK\r\n\r\nold",
    b"HTTP/1.1 204 No Content\r\n\r\n",
)
_PIECES = (
    b"\r\n",
    b"0",
    b"content-length: 3\r\n",
    b"transfer-encoding: chunked\r\n",
    b"\x00",
    b" ",
    b"9" * 30,
)
ANSWERS = 3_000

Found = tuple[int, bytes] | None
"""Status and body; None for an invalid answer."""


def damaged(chance: random.Random) -> bytes:
    answer = bytearray(chance.choice(_SEEDS))
    for _ in range(chance.randint(0, 2)):
        at = chance.randrange(len(answer) + 1)
        match chance.randrange(4):
            case 0:
                answer[at:at] = chance.choice(_PIECES)
            case 1:
                del answer[at : at + chance.randint(1, 4)]
            case 2 if at < len(answer):
                answer[at] ^= 1 << chance.randrange(8)
            case _:
                answer = answer[:at]
    return bytes(answer)


def by_h11(answer: bytes) -> Found:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "h"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(answer)
    connection.receive_data(b"")
    status, body = 0, b""
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, body


def _harmless(answer: bytes) -> bool:
    """Return whether h11 rejects only an unread part: a leading empty line or the reason phrase."""
    heads = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    return answer.startswith(b"\r\n") or any(b"\x00" in line for line in heads)


async def by_our_client(pool: UpstreamPool, port: int) -> Found:
    head = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"
    try:
        response = await pool.send(ServerAddress("127.0.0.1", port), head, b"")
    except UpstreamError:
        return None
    try:
        return response.status, await response.read()
    except UpstreamError:
        return None
    finally:
        response.close()


async def test_a_status_that_no_answer_has_is_no_answer() -> None:
    async def script(writer: asyncio.StreamWriter, _body: bytes, _number: int) -> None:
        writer.write(b"HTTP/1.1 000 OK\r\ncontent-length: 5\r\n\r\nhello")

    pool = UpstreamPool(UpstreamSettings())
    async with RawReplica(script).listening() as port, asyncio.timeout(20):
        assert await by_our_client(pool, port) is None
    pool.close()


@pytest.mark.parametrize("seed", range(6))
async def test_answers_accepted_by_our_client_are_accepted_by_h11(seed: int) -> None:
    chance = random.Random(seed)
    answers = [damaged(chance) for _ in range(ANSWERS // 6)]
    sent = b""

    async def script(writer: asyncio.StreamWriter, _body: bytes, _number: int) -> None:
        writer.write(sent)
        writer.close()

    pool = UpstreamPool(UpstreamSettings())
    differ, believed = [], 0
    async with RawReplica(script).listening() as port:
        for sent in answers:
            async with asyncio.timeout(20):
                ours, theirs = await by_our_client(pool, port), by_h11(sent)
            believed += ours is not None
            # Our client may be stricter. An answer that it accepts must be the same for h11.
            if ours is not None and ours != theirs and not _harmless(sent):
                differ.append((sent, ours, theirs))
    pool.close()
    assert differ == []
    assert believed > len(answers) / 10
