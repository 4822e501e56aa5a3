"""The proxy against real servers on real sockets, served as in a replica."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import pytest

from serve_app.engines.asgi import read_body
from serve_app.engines.engine import Receive, Scope, Send
from serve_app.engines.remote.engine import RemoteEngine, RemoteEngineSettings
from serve_app.engines.remote.proxy import RemoteProxy, Upstream
from tests.engines.servers import free_port, serving, tcp_server


class EchoServer:
    """Tells what it was asked; streams `parts` when the path ends in stream, the next when it is told to."""

    def __init__(self) -> None:
        self.requests: list[tuple[Scope, bytes]] = []
        self.go_on = asyncio.Event()
        self.client_left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        assert body is not None
        self.requests.append((scope, body))
        if scope["path"].endswith("stream"):
            await self._stream(receive, send)
            return
        headers = [(b"content-type", b"text/plain"), (b"x-kept", b"1"), (b"x-hop", b"1")]
        headers += [(b"connection", b"x-hop"), (b"set-cookie", b"a=b")]
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        await send({"type": "http.response.body", "body": body[::-1]})

    async def _stream(self, receive: Receive, send: Send) -> None:
        event_stream = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": event_stream})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        leaving = asyncio.ensure_future(receive())
        going_on = asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait((leaving, going_on), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.client_left.set()
        going_on.cancel()
        leaving.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextlib.asynccontextmanager
async def proxied(base_url: str, api_key: str | None = None, **timeouts: float) -> AsyncIterator[str]:
    """The base URL of a proxy in front of the server at `base_url`."""
    async with aiohttp.ClientSession(
        auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None, **timeouts)
    ) as session:
        proxy = RemoteProxy(Upstream(session=session, base_url=base_url, api_key=api_key))
        async with serving(proxy) as url:
            yield url


@pytest.fixture
async def server() -> AsyncIterator[tuple[EchoServer, str]]:
    echo = EchoServer()
    async with serving(echo) as base_url, proxied(base_url, api_key="server-key") as url:
        yield echo, url


def sent_headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


async def test_bytes_status_and_query_pass_as_they_are(server: tuple[EchoServer, str]) -> None:
    echo, url = server
    body = bytes(range(256)) * 1_000
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/a%2Fb%20c?x=%2B&y", content=body)
    assert (answer.status_code, answer.content) == (418, body[::-1])
    scope, received = echo.requests[0]
    assert received == body
    assert (scope["raw_path"], scope["query_string"]) == (b"/v1/a%2Fb%20c", b"x=%2B&y")
    assert scope["method"] == "POST"


async def test_the_servers_key_replaces_that_of_the_client(server: tuple[EchoServer, str]) -> None:
    echo, url = server
    async with httpx.AsyncClient() as client:
        headers = {"authorization": "Bearer client", "x-replica-token": "ours"}
        await client.post(f"{url}/v1/x", headers=headers)
    sent = sent_headers(echo.requests[0][0])
    assert sent[b"authorization"] == b"Bearer server-key"
    assert b"x-replica-token" not in sent


async def test_without_a_key_no_credentials_are_sent() -> None:
    echo = EchoServer()
    async with serving(echo) as base_url, proxied(base_url) as url, httpx.AsyncClient() as client:
        await client.get(f"{url}/v1/models", headers={"authorization": "Bearer client"})
    assert b"authorization" not in sent_headers(echo.requests[0][0])


async def test_headers_of_one_connection_stay_on_it(server: tuple[EchoServer, str]) -> None:
    echo, url = server
    async with httpx.AsyncClient() as client:
        headers = {"connection": "x-mine", "x-mine": "1", "te": "trailers", "x-yours": "2"}
        answer = await client.post(f"{url}/v1/x", headers=headers)
    sent = sent_headers(echo.requests[0][0])
    assert b"x-mine" not in sent
    assert b"te" not in sent
    assert sent[b"x-yours"] == b"2"
    assert answer.headers["x-kept"] == "1"
    assert "x-hop" not in answer.headers


async def test_no_cookie_of_the_server_is_kept_for_the_next_client() -> None:
    # The session of the engine has a jar that keeps nothing; see RemoteEngine.
    engine = RemoteEngine(RemoteEngineSettings(base_url="http://127.0.0.1:1"))
    upstream = engine._connect()
    try:
        assert isinstance(upstream.session.cookie_jar, aiohttp.DummyCookieJar)
    finally:
        await upstream.session.close()


async def test_each_part_of_a_stream_passes_at_once(server: tuple[EchoServer, str]) -> None:
    echo, url = server
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/stream") as answer:
        parts = answer.aiter_raw()
        # The server sends no more before it is told to: so this part was not held back for company.
        assert await asyncio.wait_for(anext(parts), 5) == b"data: 1\n\n"
        echo.go_on.set()
        assert b"".join([part async for part in parts]) == b"data: [DONE]\n\n"


async def test_a_client_that_leaves_in_mid_answer_closes_the_connection_to_the_server(
    server: tuple[EchoServer, str],
) -> None:
    echo, url = server
    async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/stream") as answer:
        await anext(answer.aiter_raw())
    await asyncio.wait_for(echo.client_left.wait(), 5)


async def test_a_client_that_leaves_before_the_answer_closes_the_connection_to_the_server() -> None:
    closed = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            pass
        closed.set()
        writer.close()

    async with tcp_server(say_nothing) as base_url, proxied(base_url) as url:
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=0.3) as client:
                await client.post(f"{url}/v1/x", content=b"{}")
        await asyncio.wait_for(closed.wait(), 5)


def assert_refused(answer: httpx.Response, kind: str, status: int = 502) -> None:
    assert answer.status_code == status
    assert answer.headers["x-engine-error"] == kind
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == f"engine_{kind}"


async def test_a_server_that_does_not_listen_is_unreachable() -> None:
    async with proxied(f"http://127.0.0.1:{free_port()}") as url, httpx.AsyncClient() as client:
        assert_refused(await client.post(f"{url}/v1/x", content=b"{}"), "unreachable")


async def test_a_server_that_does_not_accept_is_unreachable() -> None:
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # Fill the queue of connections, so that the next one is never taken up.
        for _ in range(3):
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.connect(full.getsockname())
        base_url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with proxied(base_url, sock_connect=0.3) as url, httpx.AsyncClient() as client:
            assert_refused(await client.post(f"{url}/v1/x", content=b"{}"), "unreachable")


async def test_a_server_that_hangs_up_without_a_word_has_lost_the_request() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        writer.transport.abort()

    async with tcp_server(hang_up) as base_url, proxied(base_url) as url, httpx.AsyncClient() as client:
        assert_refused(await client.post(f"{url}/v1/x", content=b"{}"), "lost")


async def test_a_server_that_answers_too_late_is_told_as_a_timeout() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(10_000):
            pass
        writer.close()

    async with (
        tcp_server(wait) as base_url,
        proxied(base_url, sock_read=0.3) as url,
        httpx.AsyncClient() as client,
    ):
        assert_refused(await client.post(f"{url}/v1/x", content=b"{}"), "silent", 504)


async def test_a_server_that_talks_nonsense_has_lost_the_request() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        writer.write(b"220 mail.example ready\r\n")
        writer.close()

    async with tcp_server(talk) as base_url, proxied(base_url) as url, httpx.AsyncClient() as client:
        assert_refused(await client.post(f"{url}/v1/x", content=b"{}"), "lost")


@pytest.mark.parametrize(
    "headers", [b"transfer-encoding: chunked\r\n\r\n6\r\ndata: \r\n", b"content-length: 100\r\n\r\ndata: "]
)
async def test_an_answer_that_is_cut_off_never_looks_complete(headers: bytes) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + headers)
        await writer.drain()
        writer.close()

    async with tcp_server(break_off) as base_url, proxied(base_url) as url, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{url}/v1/x", content=b"{}")


async def test_a_client_that_breaks_off_its_own_request_reaches_no_server() -> None:
    echo = EchoServer()
    async with serving(echo) as base_url, proxied(base_url) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nabc")
        await writer.drain()
        writer.close()
        async with httpx.AsyncClient() as client:
            await client.get(f"{url}/v1/next")
    assert [scope["path"] for scope, _ in echo.requests] == ["/v1/next"]


async def test_connections_to_the_server_are_used_again(server: tuple[EchoServer, str]) -> None:
    echo, url = server
    async with httpx.AsyncClient() as client:
        for _ in range(3):
            await client.post(f"{url}/v1/x", content=b"{}")
    assert len({scope["client"] for scope, _ in echo.requests}) == 1


async def test_many_requests_pass_at_once(server: tuple[EchoServer, str]) -> None:
    _, url = server
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=150), timeout=60) as client:
        bodies = [str(number).encode() for number in range(150)]
        answers = await asyncio.gather(*(client.post(f"{url}/v1/x", content=body) for body in bodies))
    assert [answer.content[::-1] for answer in answers] == bodies
