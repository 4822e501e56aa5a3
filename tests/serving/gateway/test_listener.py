"""Gateway listener on the application's own address, over real sockets."""

import asyncio
import json
import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import openai
import pytest
from ray.serve.config import HTTPOptions

from experiments.common.application import free_port
from serve_app.errors import Outcome, SettingsError
from serve_app.serving import http_server
from serve_app.serving._ray import ServedAddress
from serve_app.serving.gateway import Gateway
from serve_app.serving.gateway import deployment as gateway_listener
from serve_app.serving.gateway.deployment import GatewayListener
from serve_app.serving.http_server import ServerNotRunningError
from serve_app.serving.listening import PortError
from serve_app.serving.tls import TlsSettings
from tests.serving.certificates import Authority
from tests.serving.channel.harness import wait_until

from .builders import Engine, FakeDispatcher, chat, exchange, gateway, http_post, serving

HOST = "127.0.0.1"
IDLE_S = 1.0
ASKED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER = b'{"status":"ok"}'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(http_server, "STOPPING_IDLE_TIMEOUT_S", IDLE_S)


@dataclass
class Opened:
    """An open listener, and a client of it."""

    own: GatewayListener
    port: int
    http: httpx.AsyncClient


@asynccontextmanager
async def opened(
    app: Gateway | None = None,
    route: str = "/",
    *,
    keep_alive_s: int = 60,
    certificate: TlsSettings | None = None,
) -> AsyncIterator[Opened]:
    """Open the listener of a gateway, by default of one without an engine."""
    port = free_port()
    options = HTTPOptions(host=HOST, port=port, keep_alive_timeout_s=keep_alive_s)
    if certificate is not None:
        options = HTTPOptions(
            host=HOST, port=port, ssl_keyfile=certificate.key, ssl_certfile=certificate.certificate
        )
    own = GatewayListener(
        app or gateway(FakeDispatcher([1])), ServedAddress(options, "app", route, has_proxy=False)
    )
    await own.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=30) as http:
            yield Opened(own, port, http)
    finally:
        own.deregister(closes=True)
        await own.stop(5.0)


async def test_a_gateway_may_open_as_many_files_as_its_user() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        async with opened():
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def before_an_engine(token_delay_s: float) -> AsyncIterator[Opened]:
    """Open a listener in front of an engine with this delay between tokens."""
    async with (
        serving(Engine(token_delay_s=token_delay_s)) as engine_port,
        opened(gateway(FakeDispatcher([engine_port]))) as made,
    ):
        yield made


@dataclass
class Clients:
    """Clients that send continuously, some on one connection and some on a new one per request.

    Attributes:
        answered: number of answers.
        failed: errors and rejections.
    """

    port: int
    answered: int = 0
    failed: list[object] = field(default_factory=list)
    ending: bool = False

    async def reconnect_each_time(self) -> None:
        while not self.ending:
            reader, writer = await self._connect()
            await self._ask(reader, writer)
            writer.close()

    async def reuse_connection(self) -> None:
        connection = None
        while not self.ending:
            connection = connection or await self._connect()
            if not await self._ask(*connection):
                connection[1].close()
                connection = None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(HOST, self.port)
        except OSError as rejected:
            self.failed.append(rejected)
            raise

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send one request; return whether the connection stays open."""
        try:
            writer.write(ASKED)
            answer = await reader.readuntil(ANSWER)
        except (OSError, asyncio.IncompleteReadError) as broken:
            self.failed.append(broken)
            return False
        self.answered += 1
        await asyncio.sleep(0)
        return b"connection: close" not in answer


@pytest.mark.parametrize("overlaps", [True, False], ids=["successor first", "predecessor first"])
async def test_replacing_a_gateway_has_no_effect_on_clients(overlaps: bool) -> None:
    app = gateway(FakeDispatcher([1]))
    port = free_port()
    clients = Clients(port)
    address = ServedAddress(HTTPOptions(host=HOST, port=port), "app", "/", has_proxy=False)
    last = GatewayListener(app, address)
    await last.start()
    asking = [asyncio.create_task(clients.reconnect_each_time()) for _ in range(4)]
    asking += [asyncio.create_task(clients.reuse_connection()) for _ in range(4)]
    for _ in range(3):
        before = clients.answered
        while clients.answered < before + 100:  # noqa: ASYNC110 - clients only count
            await asyncio.sleep(0.01)
        successor = GatewayListener(app, address)
        if overlaps:
            await successor.start()
        await last.stop(10.0)
        if not overlaps:
            await successor.start()
        last = successor
    clients.ending = True
    await asyncio.gather(*asking)
    last.deregister(closes=True)
    await last.stop(5.0)
    assert clients.failed == []


async def test_a_stopping_gateway_waits_for_streams_and_accepts_no_new_clients() -> None:
    async with (
        before_an_engine(0.05) as it,
        openai.AsyncOpenAI(base_url=f"http://{HOST}:{it.port}/v1", api_key="x") as sdk,
    ):
        stream = await sdk.chat.completions.create(**chat(stream=True, max_tokens=20))
        words = [(await anext(stream)).choices[0].delta.content]
        it.own.deregister(closes=True)
        ending = asyncio.create_task(it.own.stop(30.0))
        words += [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        await ending
        assert "".join(word or "" for word in words).split() == [f"w{number}" for number in range(20)]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, it.port)
        with pytest.raises(ServerNotRunningError):
            it.own.check_health()


async def test_open_requests_end_with_an_error_at_the_end_of_the_drain() -> None:
    async with serving(Engine(token_delay_s=0.2)) as engine_port:
        dispatcher = FakeDispatcher([engine_port])
        async with opened(gateway(dispatcher)) as it, asyncio.timeout(15):
            body = chat(stream=True, max_tokens=500)
            begun = asyncio.create_task(it.http.post("/v1/chat/completions", json=body))
            await wait_until(lambda: "first_token" in dispatcher.names())
            dispatcher.gate.clear()
            waits = asyncio.create_task(it.http.post("/v1/chat/completions", json=chat()))
            await wait_until(lambda: dispatcher.waiting == 1)
            await it.own.stop(1.0)
            *_, last, _ = (await begun).text.split("\n\n")
            rejected = await waits
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "shutting_down")
    assert rejected.headers["retry-after"] == "1"
    # Not a cancellation, which would be the client's.
    assert dispatcher.outcomes() == [Outcome.FAILED]


async def test_a_busy_connection_gets_connection_close_and_an_idle_one_ends() -> None:
    async with opened() as it:
        reader, writer = await asyncio.open_connection(HOST, it.port)
        idle = await asyncio.open_connection(HOST, it.port)
        for one in ((reader, writer), idle):
            one[1].write(ASKED)
            assert b"connection: close" not in await one[0].readuntil(ANSWER)
        ending = asyncio.create_task(it.own.stop(30.0))
        await asyncio.sleep(0.2)
        writer.write(ASKED)
        assert b"connection: close" in await reader.readuntil(ANSWER)
        async with asyncio.timeout(10):
            assert await idle[0].read() == b""
            await ending


async def test_a_gateway_that_stops_fails_its_health_check_first_and_still_serves() -> None:
    async with opened() as it:
        stopping = asyncio.create_task(it.own.stop(5.0, deregister_s=0.5))
        await asyncio.sleep(0.1)
        assert (await it.http.get("/-/healthz")).status_code == 503
        served = await it.http.get("/health")
        assert (served.status_code, served.headers.get("connection")) == (200, None)
        await stopping


async def test_an_idle_connection_ends_after_its_time_and_a_busy_one_does_not() -> None:
    async with opened(keep_alive_s=1) as it:
        idle, writer = await asyncio.open_connection(HOST, it.port)
        writer.write(ASKED)
        await idle.readuntil(ANSWER)
        busy = await asyncio.open_connection(HOST, it.port)
        until = asyncio.get_running_loop().time() + 2.0
        while asyncio.get_running_loop().time() < until:
            busy[1].write(ASKED)
            await busy[0].readuntil(ANSWER)
            await asyncio.sleep(0.3)
        async with asyncio.timeout(5):
            assert await idle.read() == b""


async def test_answers_bear_the_time_of_day() -> None:
    async with opened() as it:
        first = (await it.http.get("/health")).headers["date"]
        await asyncio.sleep(1.1)
        later = (await it.http.get("/health")).headers["date"]
    assert parsedate_to_datetime(first) < parsedate_to_datetime(later)


async def test_an_incomplete_head_is_answered_and_silence_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
    async with opened() as it:
        assert (await exchange(it.port, b"GET /health HTT")).startswith(b"HTTP/1.1 408 ")
        _, answered, later = (await exchange(it.port, ASKED, b"GET /health HTTP/1.1\r\nx: ")).partition(
            ANSWER
        )
        assert answered
        assert later.startswith(b"HTTP/1.1 408 ")
        assert await exchange(it.port) == b""


async def test_a_head_that_stays_half_sent_does_not_end_the_answer_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
    async with before_an_engine(0.05) as it:
        answer = await exchange(it.port, http_post(chat(stream=True, max_tokens=20)), b"GET /health HTT")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"408" not in answer.partition(b"\r\n\r\n")[2]


async def test_one_connection_too_many_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_listener, "max_connections", lambda: 2)
    async with opened() as it:
        held = [await asyncio.open_connection(HOST, it.port) for _ in range(2)]
        for reader, writer in held:
            writer.write(ASKED)
            await reader.readuntil(ANSWER)
        answer = await exchange(it.port, ASKED)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        held[0][1].close()
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection(HOST, it.port)
        writer.write(ASKED)
        assert (await reader.readuntil(ANSWER)).startswith(b"HTTP/1.1 200 ")


async def test_a_prefix_is_taken_off_and_serve_s_own_pages_are_there() -> None:
    async with opened(route="/llm") as it:
        assert (await it.http.get("/llm/v1/models")).json()["data"][0]["id"] == "tiny"
        missing = await it.http.get("/v1/models")
        assert missing.status_code == 404
        assert "/-/routes" in missing.text
        assert (await it.http.get("/-/routes")).json() == {"/llm": "app"}
        assert (await it.http.get("/-/healthz")).text == "success"


async def test_certificates_of_serve_are_shown(tmp_path: Path) -> None:
    files = Authority(tmp_path).process(name="localhost")
    async with opened(certificate=files) as it:
        trusted = ssl.create_default_context(cafile=files.ca)
        trusted.check_hostname = False
        async with httpx.AsyncClient(base_url=f"https://{HOST}:{it.port}", verify=trusted) as http:
            assert (await http.get("/health")).json() == {"status": "ok"}
        assert b"HTTP/1.1 200" not in await exchange(it.port, ASKED)


async def test_an_address_in_use_is_rejected_by_name() -> None:
    app = gateway(FakeDispatcher([1]))
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    address = ServedAddress(HTTPOptions(host=HOST, port=port), "app", "/", has_proxy=False)
    with pytest.raises(PortError, match=f"cannot listen on {HOST}:{port}"):
        await GatewayListener(app, address).start()
    server.close()


@pytest.mark.parametrize(
    ("options", "has_proxy", "message"),
    [
        (HTTPOptions(request_timeout_s=5.0), False, "5.0 is not supported: use queue_timeout_s"),
        (HTTPOptions(), True, "proxy_location must be Disabled"),
    ],
)
def test_proxies_of_serve_and_their_options_are_rejected(
    options: HTTPOptions, has_proxy: bool, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        GatewayListener(gateway(FakeDispatcher([1])), ServedAddress(options, "app", "/", has_proxy))
