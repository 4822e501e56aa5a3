"""HTTP/1.1 client towards replicas, against scripted sockets."""

import asyncio
import socket

import pytest

from serve_app.core.events import DispatchFailure
from serve_app.errors import SettingsError
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool, UpstreamSettings
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import RawReplica

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-Thing: a\r\n\r\nok"


def head(body: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)


def address(port: int) -> ServerAddress:
    return ServerAddress("127.0.0.1", port)


def writes(*pieces: bytes, pause_s: float = 0.0, close: bool = False) -> RawReplica:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return RawReplica(script)


async def send_request(pool: UpstreamPool, port: int, body: bytes = b"") -> tuple[int, bytes]:
    response = await pool.send(address(port), head(body), body)
    try:
        return response.status, await response.read()
    finally:
        response.close()


async def test_a_connection_is_kept_alive_and_reused() -> None:
    pool, replica = UpstreamPool(UpstreamSettings()), writes(OK)
    async with replica.listening() as port:
        for _ in range(3):
            assert await send_request(pool, port) == (200, b"ok")
        assert (pool.connects, replica.connections) == (1, 1)
        assert repr(pool) == "<UpstreamPool busy=0 idle=1 connects=1>"
        pool.close()
        assert repr(pool) == "<UpstreamPool busy=0 idle=0 connects=1>"


async def test_chunks_arrive_one_by_one_and_headers_in_lower_case() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Thing: a\r\n\r\n3\r\nabc\r\n"
    replica = writes(chunked, b"2\r\nde\r\n", b"0\r\n\r\n", pause_s=0.05)
    pool = UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        response = await pool.send(address(port), head(), b"")
        assert response.header(b"x-thing") == b"a"
        assert [await response.next(), await response.next(), await response.next()] == [b"abc", b"de", b""]
        assert response.at_end
        assert repr(pool) == "<UpstreamPool busy=0 idle=1 connects=1>"
        pool.close()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n" * 5_000, id="headers"),
        pytest.param(b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 2_000, id="early hints"),
        pytest.param(CHUNKED + b"0\r\nx-a: ", b"a" * 50_000, id="trailer"),
        pytest.param(CHUNKED + b"3;", b"a" * 50_000, id="extension of a chunk"),
    ],
)
async def test_an_answer_with_endless_framing_fails_at_the_limit_of_a_head(
    start: bytes, piece: bytes
) -> None:
    replica, pool = writes(start, *[piece] * 100, pause_s=0.001), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port, asyncio.timeout(20):
        with pytest.raises(
            UpstreamError, match="the head or chunk framing of the replica's answer exceeds 65536 bytes"
        ):
            await send_request(pool, port)
        pool.close()


async def test_trailers_are_not_headers_of_the_answer() -> None:
    pool, replica = UpstreamPool(UpstreamSettings()), writes(CHUNKED + b"0\r\nx-a: b\r\n\r\n")
    async with replica.listening() as port:
        response = await pool.send(address(port), head(), b"")
        assert await response.read() == b"ok"
        assert response.header(b"x-a") == b""
        pool.close()


async def test_an_idle_connection_that_the_replica_closed_is_replaced_transparently() -> None:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        if number == 2:
            writer.transport.abort()  # just as the second request arrives
        else:
            writer.write(OK)

    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        assert await send_request(pool, port) == (200, b"ok")
        assert await send_request(pool, port) == (200, b"ok")
        assert (pool.connects, pool.stale_retries) == (2, 1)
        pool.close()


async def test_a_replica_that_dies_with_a_request_on_a_reused_connection_is_lost() -> None:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        if number == 2:
            replica.stop_listening()
            writer.transport.abort()
        else:
            writer.write(OK)

    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        assert await send_request(pool, port) == (200, b"ok")
        with pytest.raises(UpstreamError) as caught:
            await send_request(pool, port)
        assert caught.value.failure is DispatchFailure.LOST


async def test_a_reused_connection_that_breaks_during_a_request_is_lost_and_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        if number == 2:
            await asyncio.sleep(0.2)
            writer.transport.abort()
        else:
            writer.write(OK)

    monkeypatch.setattr("serve_app.serving.gateway.upstream._STALE_WINDOW_S", 0.05)
    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        assert await send_request(pool, port) == (200, b"ok")
        with pytest.raises(UpstreamError) as caught:
            await send_request(pool, port)
        assert caught.value.failure is DispatchFailure.LOST
        assert (len(replica.requests), pool.stale_retries) == (2, 0)


async def test_a_reused_connection_that_stays_silent_is_not_retried() -> None:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        if number == 1:
            writer.write(OK)

    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings(silence_timeout_s=0.1))
    async with replica.listening() as port:
        assert await send_request(pool, port) == (200, b"ok")
        with pytest.raises(UpstreamError, match="sent nothing"):
            await send_request(pool, port)
        assert len(replica.requests) == 2


async def test_a_rejected_connection_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pool = UpstreamPool(UpstreamSettings())
    with pytest.raises(UpstreamError) as caught:
        await send_request(pool, port)
    assert caught.value.failure is DispatchFailure.UNREACHABLE


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((), "closed the connection"),
        ((b"HTTP/1.1 200 OK\r\ncontent-le",), "closed the connection"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",), "closed the connection"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",), "closed the connection"),
        ((b"HTTP/1.1 200 OK\r\n\r\nabc",), "neither content-length nor chunked"),
        ((b"SSH-2.0-OpenSSH\r\n",), "not valid HTTP"),
        (
            (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",),
            "neither content-length nor chunked|not valid HTTP",
        ),
    ],
)
async def test_a_broken_answer_is_lost_and_never_taken_for_whole(
    pieces: tuple[bytes, ...], words: str
) -> None:
    pool, replica = UpstreamPool(UpstreamSettings()), writes(*pieces, close=True)
    async with replica.listening() as port:
        with pytest.raises(UpstreamError, match=words) as caught:
            await send_request(pool, port)
        assert caught.value.failure is DispatchFailure.LOST
        assert replica.connections == 1
        assert repr(pool) == "<UpstreamPool busy=0 idle=0 connects=1>"


async def test_interim_answers_are_passed_over() -> None:
    pool = UpstreamPool(UpstreamSettings())
    replica = writes(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", OK)
    async with replica.listening() as port:
        response = await pool.send(address(port), head(), b"")
        assert (response.status, response.header(b"link"), await response.read()) == (200, b"", b"ok")
        assert await send_request(pool, port) == (200, b"ok")
        assert pool.connects == 1
        pool.close()


@pytest.mark.parametrize("more", [OK.replace(b"ok", b"NO"), b"no answer at all"])
async def test_unsolicited_bytes_after_an_answer_never_reach_the_next_request(more: bytes) -> None:
    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        writer.write(OK if number > 1 else OK + more)

    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        assert await send_request(pool, port) == (200, b"ok")
        assert await send_request(pool, port) == (200, b"ok")
        assert pool.connects == 2
        pool.close()


async def test_a_connection_with_close_is_not_reused() -> None:
    replica = writes(OK.replace(b"X-Thing: a", b"connection: close"))
    pool = UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        assert await send_request(pool, port) == (200, b"ok")
        assert repr(pool) == "<UpstreamPool busy=0 idle=0 connects=1>"


async def test_idle_connections_are_limited() -> None:
    replica, pool = writes(OK), UpstreamPool(UpstreamSettings(max_idle_per_replica=2))
    async with replica.listening() as port:
        await asyncio.gather(*(send_request(pool, port) for _ in range(5)))
        assert repr(pool) == "<UpstreamPool busy=0 idle=2 connects=5>"
        pool.close()


async def test_idle_connections_are_closed_in_time() -> None:
    replica, pool = writes(OK), UpstreamPool(UpstreamSettings(idle_expiry_s=0.1))
    async with replica.listening() as port:
        await send_request(pool, port)
        await wait_until(lambda: "idle=0" in repr(pool))
        assert await send_request(pool, port) == (200, b"ok")
        pool.close()


async def test_a_silent_replica_is_given_up() -> None:
    replica, pool = writes(), UpstreamPool(UpstreamSettings(silence_timeout_s=0.1))
    async with replica.listening() as port:
        with pytest.raises(UpstreamError, match="sent nothing for") as caught:
            await send_request(pool, port)
        assert caught.value.failure is DispatchFailure.LOST


async def test_a_large_body_arrives_whole() -> None:
    seen: list[bytes] = []

    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        seen.append(body)
        writer.write(OK)

    body = bytes(range(256)) * 20_000
    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        assert await send_request(pool, port, body) == (200, b"ok")
        assert await send_request(pool, port, body) == (200, b"ok")
        assert seen == [body, body]
        assert pool.connects == 1
        pool.close()


async def test_an_answer_to_half_a_request_ends_the_connection() -> None:
    answered = asyncio.Event()

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await answered.wait()
        writer.close()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    pool = UpstreamPool(UpstreamSettings())
    status, body = await send_request(pool, server.sockets[0].getsockname()[1], b"x" * 50_000_000)
    assert (status, body) == (413, b"no")
    assert "idle=0" in repr(pool)
    answered.set()
    server.close()


async def test_a_slow_reader_stops_the_replica() -> None:
    sent = 0

    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 40000000\r\n\r\n")
        for _ in range(400):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000

    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        response = await pool.send(address(port), head(), b"")
        await asyncio.sleep(0.3)
        held = sent
        await asyncio.sleep(0.2)
        assert sent == held < 30_000_000
        received = 0
        while piece := await response.next():
            received += len(piece)
            assert len(piece) < 2_000_000
        assert received == 40_000_000
        assert repr(pool) == "<UpstreamPool busy=0 idle=1 connects=1>"
        pool.close()


@pytest.mark.parametrize("whole", [True, False])
async def test_the_end_of_an_answer_is_reported_to_a_caller_that_does_not_read(whole: bool) -> None:
    body = b"x" * 1_000
    replica = writes(
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", body[: 1_000 if whole else 9], close=True
    )
    pool = UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        response = await pool.send(address(port), head(), b"")
        ended = asyncio.Event()
        response.on_change = lambda: ended.set() if response.has_ended else None
        if not response.has_ended:
            await asyncio.wait_for(ended.wait(), 5)
        assert (response.error is None) is whole
        assert response.take() == body[: 1_000 if whole else 9]
        response.close()
        pool.close()


async def test_closing_an_unfinished_answer_cuts_the_connection() -> None:
    gone = asyncio.Event()

    async def script(writer: asyncio.StreamWriter, body: bytes, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        await writer.drain()
        await writer.wait_closed()

    replica, pool = RawReplica(script), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        response = await pool.send(address(port), head(), b"")
        assert await response.next() == b"abc"
        response.close()
        assert repr(pool) == "<UpstreamPool busy=0 idle=0 connects=1>"
        with pytest.raises(UpstreamError):
            await response.next()
    assert not gone.is_set()


async def test_a_cancelled_request_leaves_no_connection_behind() -> None:
    replica, pool = writes(), UpstreamPool(UpstreamSettings())
    async with replica.listening() as port:
        task = asyncio.create_task(send_request(pool, port))
        await wait_until(lambda: replica.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert repr(pool) == "<UpstreamPool busy=0 idle=0 connects=1>"


@pytest.mark.parametrize(
    "changes", [{"connect_timeout_s": 0}, {"idle_expiry_s": -1.0}, {"max_idle_per_replica": -1}]
)
def test_impossible_settings_are_rejected_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=f"upstream.{next(iter(changes))}"):
        UpstreamSettings(**changes)  # type: ignore[arg-type]  # that is the point
