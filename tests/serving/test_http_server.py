"""HTTP server with arbitrary apps, on both event loops; for gateways see `test_connections`."""

import asyncio
import contextlib
import errno
import gc
import re
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from serve_app.engines.engine import ASGIApp, Receive, Scope, Send
from serve_app.serving import http_server
from serve_app.serving.http_server import (
    Exchange,
    HttpServer,
    HttpServerOptions,
    ServerNotRunningError,
    asgi_application,
)
from serve_app.serving.listening import listening_socket
from tests.http_server import listening
from tests.serving.channel.harness import wait_until

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
CLOSE = b"host: x\r\nconnection: close\r\n\r\n"


async def echo(_: Scope, receive: Receive, send: Send) -> None:
    """Answer with the request's body in chunks."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    more = True
    while more:
        message = await receive()
        more = message["more_body"]
        await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await send({"type": "http.response.body"})


async def paths(scope: Scope, _: Receive, send: Send) -> None:
    """Answer with the path and a semicolon."""
    body = scope["path"].encode() + b";"
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def fails(_: Scope, __: Receive, ___: Send) -> None:
    raise ValueError("as an app may")


async def stops_midway(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"abc", "more_body": True})


def bare_server() -> HttpServer:
    return HttpServer("a test", asgi_application(paths), HttpServerOptions(idle_s=5.0))


async def answer_to(app: ASGIApp, *sent: bytes) -> bytes:
    """Send a request; return everything until the server closes."""
    async with listening(app) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0.01)
        answer = await reader.read()
        writer.close()
        return answer


@pytest.mark.parametrize("loop", LOOPS)
def test_a_body_in_chunks_is_returned_in_chunks(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    head = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n" + CLOSE
    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(answer_to(echo, head, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body.replace(b"\r\n", b"").endswith(b"0")
    assert b"abc" in body
    assert b"de" in body


async def test_a_request_is_freed_without_the_garbage_collector() -> None:
    """Objects of each request that refer to each other would cost its pauses."""

    class Mark:
        pass

    marks: list[weakref.ref[Mark]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["mark"] = mark = Mark()
        marks.append(weakref.ref(mark))
        await echo(scope, receive, send)

    gc.disable()
    try:
        await answer_to(app, b"GET / HTTP/1.1\r\n" + CLOSE)
        assert [mark() for mark in marks] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("app", "begins"), [(fails, b"HTTP/1.1 500 Internal Server Error\r\n"), (stops_midway, b"HTTP/1.1 200 ")]
)
async def test_an_app_that_does_not_answer_ends_its_connection(app: ASGIApp, begins: bytes) -> None:
    answer = await answer_to(app, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(begins)


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ([(b"content-length", b"2")], b"abc", "the response body exceeds its content-length by 1 bytes"),
        ([(b"content-length", b"9")], b"abc", "the response body is 6 bytes shorter than its content-length"),
        ([(b"x y", b"1")], b"", "invalid characters in the name or value of header b'x y'"),
    ],
)
async def test_an_invalid_response_raises_an_error_that_states_the_difference(
    headers: list[tuple[bytes, bytes]], body: bytes, message: str
) -> None:
    errors: list[str] = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except RuntimeError as error:
            errors.append(str(error))

    await answer_to(app, b"GET / HTTP/1.1\r\n" + CLOSE)
    assert errors == [message]


@pytest.mark.parametrize("broken", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000])
async def test_an_invalid_head_is_rejected(broken: bytes) -> None:
    assert (await answer_to(echo, broken[:100], broken[100:])).startswith(b"HTTP/1.1 400 Bad Request\r\n")


async def test_a_head_that_arrives_at_once_has_the_same_limit() -> None:
    start = b"GET / HTTP/1.1\r\nconnection: close\r\nx: "
    for length, status in ((65_000, b"200"), (66_000, b"400"), (150_000, b"400")):
        answer = await answer_to(paths, start.ljust(length, b"y") + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"head is longer than 65536 bytes" in answer


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4000000\r\n\r\n", 4_000_000),
        (b"nonsense\r\n\r\n", 900_000),
    ],
    ids=["a body that is not read", "an invalid head"],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_response_before_the_end_of_a_request_is_not_lost(
    loop: Callable[[], asyncio.AbstractEventLoop], start: bytes, length: int
) -> None:
    def send_then_read(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(start)
            # The server has responded, and the client sends on, as most do.
            time.sleep(0.1)
            sock.sendall(b"z" * length)
            return b"".join(iter(lambda: sock.recv(65_536), b""))

    async def play() -> bytes:
        async with listening(paths) as port:
            return await asyncio.to_thread(send_then_read, port)

    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(play())
    assert re.match(rb"HTTP/1.1 (200|400) ", answer)


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def endless_after(port: int, start: bytes, piece: bytes) -> tuple[int, bytes]:
    """Send `piece` again and again, at most 16 MB; return the bytes sent and what the server answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 16_000_000 and not reader.at_eof():
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
    writer.write_eof() if not writer.is_closing() else None
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    return sent, answer


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(CHUNKED + b"3\r\nabc\r\n0\r\nX-A: ", b"a" * 50_000, id="trailer"),
        pytest.param(CHUNKED + b"3\r\nabc\r\n0\r\n", b"x-a: b\r\n" * 5_000, id="trailers"),
        pytest.param(CHUNKED + b"3\r\nabc\r\n3;", b"a" * 50_000, id="extension of a chunk"),
        pytest.param(CHUNKED + b"3\r\nabc\r\n", b"0" * 50_000, id="size of a chunk"),
        pytest.param(b"", b"\r\n" * 25_000, id="empty lines before a request"),
    ],
)
async def test_framing_without_end_is_rejected_at_the_limit_of_a_head(start: bytes, piece: bytes) -> None:
    async with listening(echo) as port, asyncio.timeout(20):
        sent, answer = await endless_after(port, start, piece)
    assert sent < 16_000_000
    assert not answer.endswith(b"0\r\n\r\n"), "the body did not end, so the echo must not end either"


async def test_trailers_without_end_after_the_response_get_no_second_response() -> None:
    async def ignores_bodies(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with listening(ignores_bodies) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + b"0\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"x-a: b\r\n" * 20_000)
        rest = b""
        with contextlib.suppress(ConnectionError):
            rest = await reader.read()
        writer.close()
    assert rest in {b"", b"ok"}


async def test_a_broken_second_request_does_not_end_the_response_before_it() -> None:
    async def slow(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"ok"})

    answer = await answer_to(slow, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_burst_of_connections_is_left_to_other_processes_of_the_socket(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def play() -> list[int]:
        server, sock = bare_server(), listening_socket("127.0.0.1", 0, 1, 64)
        with contextlib.ExitStack() as clients:
            for _ in range(40):
                clients.enter_context(socket.create_connection(sock.getsockname()))
            await server.start(sock)
            counts = [server.connections]
            while counts[-1] < 40:
                await asyncio.sleep(0)
                counts.append(server.connections)
        await server.stop(0.0)
        return sorted(set(counts))

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(play()) == [0, 16, 32, 40]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_accepts_out_of_turn_what_no_other_process_accepts(
    loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_TURN_S", 0.05)
    seen: list[int] = []

    def has_turn(connections: int) -> bool:
        seen.append(connections)
        return connections < 2

    async def play() -> tuple[list[int], int]:
        server, sock = bare_server(), listening_socket("127.0.0.1", 0, 1, 64)
        with contextlib.ExitStack() as clients:
            for _ in range(5):
                clients.enter_context(socket.create_connection(sock.getsockname()))
            await server.start(sock, has_turn)
            counts = {server.connections}
            async with asyncio.timeout(10):
                while server.connections < 5:
                    await asyncio.sleep(0)
                    counts.add(server.connections)
        await wait_until(lambda: server.connections == 0)
        await server.stop(0.0)
        return sorted(counts), seen[-1]

    with asyncio.Runner(loop_factory=loop) as runner:
        # Two in its turn, and then one at a time: a process that is only busy for a moment gets the others.
        assert runner.run(play()) == ([0, 2, 3, 4, 5], 0)


async def test_a_server_without_free_descriptors_accepts_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_ACCEPT_PAUSE_S", 0.05)

    class Exhausted(socket.socket):
        failures = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    server, sock = bare_server(), Exhausted()
    sock.bind(("127.0.0.1", 0))
    sock.listen(8)
    sock.setblocking(False)
    await server.start(sock)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n" + CLOSE)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert caplog.text.count("event=accept_failed") == 3
    await server.stop(1.0)


async def test_a_server_that_has_stopped_is_not_healthy() -> None:
    server = HttpServer("a test", asgi_application(echo), HttpServerOptions(idle_s=5.0))
    with pytest.raises(ServerNotRunningError, match="has not been started"):
        server.check_health()
    await server.start(listening_socket("127.0.0.1", 0, 1, 16))
    server.check_health()
    await server.stop(0.0)
    with pytest.raises(ServerNotRunningError, match="has ended"):
        server.check_health()


async def large(_: Scope, __: Receive, send: Send) -> None:
    """Answer in one piece that is longer than all buffers."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 10_000_000})


async def endless(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _piece in range(10_000):
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})


class Respond:
    """Application that responds at once with 10 kB, as error responses and `/-/healthz` do."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, exchange: Exchange) -> None:
        self.paths.append(exchange.path)
        exchange.respond(200, [], exchange.path.encode().ljust(10_000))


async def echo_whole(_: Scope, receive: Receive, send: Send) -> None:
    """Answer with the request's body once it has arrived, after the `100 Continue` if one is expected."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10000")]})
    await send({"type": "http.response.body", "body": body.ljust(10_000)})


@contextlib.asynccontextmanager
async def requested(
    app: ASGIApp | Respond, stalled_s: float | None, sent: bytes = b"GET / HTTP/1.1\r\n" + CLOSE
) -> AsyncIterator[tuple[HttpServer, socket.socket]]:
    """Run a server that receives bytes over small socket buffers; yield the server and the client."""
    application = app if isinstance(app, Respond) else asgi_application(app)
    server = HttpServer("a test", application, HttpServerOptions(idle_s=5.0, stalled_s=stalled_s))
    listener = listening_socket("127.0.0.1", 0, 1, 16)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    await server.start(listener)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        sending = asyncio.create_task(loop.sock_sendall(client, sent))
        await wait_until(lambda: server.connections)
        yield server, client
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending
        await server.stop(0.0)


@pytest.mark.parametrize("app", [large, endless])
async def test_a_client_that_reads_nothing_is_disconnected(
    app: ASGIApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.05)
    async with requested(app, 0.3) as (server, _):
        await wait_until(lambda: not server.connections, within_s=5)
        await wait_until(lambda: not server.tasks)


async def test_a_client_that_reads_slowly_receives_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.05)
    async with requested(large, 0.5) as (_, client):
        received, pauses = 0, 0
        while piece := await asyncio.get_running_loop().sock_recv(client, 1_000_000):
            received += len(piece)
            if received > pauses * 1_000_000:
                pauses += 1
                await asyncio.sleep(0.2)
    assert received > 10_000_000


def open_exchanges() -> int:
    return sum(isinstance(each, Exchange) for each in gc.get_objects())


def pipelined(count: int) -> bytes:
    return b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(count))


@pytest.mark.parametrize("loop", LOOPS)
def test_pipelined_requests_wait_while_their_client_reads_nothing(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def run() -> None:
        app, count = Respond(), 50_000
        async with asyncio.timeout(60), requested(app, None, pipelined(count)) as (_, client):
            responses = -1
            while responses < len(app.paths):
                responses = len(app.paths)
                await asyncio.sleep(0.5)
            assert responses < 100
            assert open_exchanges() < 2_000
            received = bytearray()
            while received.count(b"\r\n\r\n", -20_000) == 0 or len(app.paths) < 500:
                received += await asyncio.get_running_loop().sock_recv(client, 1_000_000)
            assert app.paths == [f"/{number}" for number in range(len(app.paths))]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("size", [1, 20_000])
async def test_a_client_that_reads_late_receives_every_pipelined_response(size: int) -> None:
    count = 2_000
    sent = pipelined(count - 1) + b"GET /last HTTP/1.1\r\n" + CLOSE
    async with asyncio.timeout(60), requested(Respond(), None, sent) as (_, client):
        await asyncio.sleep(0.5)
        received = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(client, size * 50):
            received += piece
    paths = re.findall(rb"\r\n\r\n(/\w+) ", received)
    assert paths == [*(b"/%d" % number for number in range(count - 1)), b"/last"]


@pytest.mark.parametrize("loop", LOOPS)
def test_pipelined_bodies_of_any_size_are_returned(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    sent, total = b"", 0
    for number in range(300):
        body = b"%d" % (number % 10) * (number * 7919 % 40_000 + 1)
        total += len(body)
        if number % 2:
            sent += b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        else:
            sent += CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    sent += b"GET / HTTP/1.1\r\n" + CLOSE
    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(answer_to(echo, sent))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 301
    chunks = re.findall(rb"\r\n([0-9a-f]+)\r\n(?=\d)", answer)
    assert sum(int(size, 16) for size in chunks if int(size, 16)) == total


async def test_framing_without_end_behind_requests_that_wait_ends_the_connection() -> None:
    async with listening(echo_whole) as port, asyncio.timeout(20):
        _, answer = await endless_after(port, pipelined(3) + CHUNKED + b"3;", b"a" * 50_000)
    assert answer.count(b"HTTP/1.1 200 ") <= 3


@pytest.mark.parametrize("app", [Respond(), echo_whole])
@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    ],
)
async def test_a_client_that_reads_no_pipelined_response_is_disconnected(
    app: ASGIApp | Respond, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.05)
    async with requested(app, 1.0, request_ * 50_000) as (server, _):
        most, _ = 0, gc.collect()
        while server.connections:
            most = max(most, open_exchanges())
            await asyncio.sleep(0.05)
        assert most < 2_000
        await wait_until(lambda: not server.tasks)


async def test_a_head_behind_a_slow_response_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not read it while requests before it wait."""
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)

    async def slow(_: Scope, __: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    sent = b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nGET /3 HTTP"
    async with listening(slow) as port, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"/1.1\r\n" + CLOSE)
        rest = await reader.read()
        writer.close()
    assert rest.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("loop", LOOPS)
def test_thousands_of_upgrades_in_one_write_are_responded_to(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    offer = b"GET /%d HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    sent = b"".join(offer % number for number in range(5_000)) + b"GET /last HTTP/1.1\r\n" + CLOSE
    with asyncio.Runner(loop_factory=loop) as runner:
        answer = runner.run(answer_to(paths, sent))
    assert re.findall(rb"/\w+;", answer) == [*(b"/%d;" % number for number in range(5_000)), b"/last;"]


async def test_stopping_disconnects_a_client_that_reads_nothing() -> None:
    async with requested(large, None) as (server, _):
        await wait_until(lambda: not server.tasks)
        await server.stop(0.1)
        await wait_until(lambda: not server.connections)
