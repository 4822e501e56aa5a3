"""TLS between processes: only peers with a certificate of the authority are served."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.errors import SettingsError
from serve_app.serving import http_server
from serve_app.serving.channel.messages import Welcome
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamPool, UpstreamSettings
from serve_app.serving.http_server import (
    Application,
    Exchange,
    HttpServer,
    HttpServerOptions,
    asgi_application,
)
from serve_app.serving.listening import listening_socket
from serve_app.serving.pool import PoolReplica, PoolReplicaSettings, ReplicaServer, ReplicaServerSettings
from serve_app.serving.tls import Tls, TlsSettings
from tests.serving.certificates import Authority
from tests.serving.channel.harness import (
    FAST,
    AwaitedClient,
    ControlPlane,
    RawPeer,
    granted,
    hello,
    scheduler_settings,
    socket_descriptors,
    wait_until,
)
from tests.serving.gateway.builders import serving

REQUEST = b"GET / HTTP/1.1\r\nHost: replica\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def channel(authority: Authority) -> ChannelSettings:
    return replace(FAST, tls=authority.process())


@pytest.fixture
async def control_plane(channel: ChannelSettings) -> AsyncIterator[ControlPlane]:
    """Yield a scheduler that requires certificates."""
    control_plane = ControlPlane(scheduler_settings(), channel)
    await control_plane.begin()
    yield control_plane
    await control_plane.close()


async def test_gateways_and_replicas_with_certificates_speak_to_the_scheduler(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    assert (await granted(gateway, "r1")).address.replica_id == "s1"
    await control_plane.restart()
    await wait_until(lambda: gateway.is_connected and gateway.incarnation == 2)
    assert (await granted(gateway, "r2")).address.replica_id == "s1"


async def test_the_secret_alone_is_not_accepted(control_plane: ControlPlane, tmp_path: Path) -> None:
    plain = await RawPeer.at(control_plane.endpoint())
    plain.send(hello(control_plane.endpoint()))
    with pytest.raises(ConnectionError, match="closed before a Welcome arrived"):
        await plain.receive(Welcome)
    strange = replace(control_plane.channel, tls=Authority(tmp_path / "theirs").process())
    for settings in (strange, FAST):
        client = AwaitedClient("raw-peer", control_plane.locate, settings)
        client.start()
        await asyncio.sleep(1.0)
        assert not client.is_connected
        await client.close()
    assert (await control_plane.gateway()).is_connected


async def test_connections_that_do_not_finish_their_handshake_are_closed(control_plane: ControlPlane) -> None:
    before = len(socket_descriptors())
    crowd = await asyncio.gather(*(RawPeer.at(control_plane.endpoint()) for _ in range(300)))
    for raw_peer in crowd:
        assert await raw_peer.closed()
        raw_peer.leave()
    await wait_until(lambda: len(socket_descriptors()) <= before)
    assert (await control_plane.gateway()).is_connected


async def hello_world(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@contextlib.asynccontextmanager
async def replica_port(tls: TlsSettings) -> AsyncIterator[ReplicaServer]:
    server = ReplicaServer(hello_world, "127.0.0.1", ReplicaServerSettings(), tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.1)


async def answer_of(server: ReplicaServer, tls: TlsSettings | None) -> bytes:
    pool = UpstreamPool(UpstreamSettings(), None if tls is None else Tls(tls))
    try:
        response = await pool.send(ServerAddress(server.host, server.port), REQUEST, b"")
        return await response.read()
    finally:
        pool.close()


async def test_a_replicas_port_answers_only_gateways_with_certificates(
    authority: Authority, tmp_path: Path
) -> None:
    async with replica_port(authority.process()) as server:
        assert await answer_of(server, authority.process("gateway.internal")) == b"hello"
        for outsider in (None, Authority(tmp_path / "theirs").process()):
            with pytest.raises(UpstreamError):
                await answer_of(server, outsider)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        async with httpx.AsyncClient(verify=context) as without_certificate:
            with pytest.raises(httpx.TransportError):
                await without_certificate.get(f"https://127.0.0.1:{server.port}/")


async def test_a_name_can_be_required_if_the_authority_signs_others_too(authority: Authority) -> None:
    async with replica_port(authority.process("ewsjf.internal")) as server:
        asks = authority.process("gateway.internal", expected="ewsjf.internal")
        assert await answer_of(server, asks) == b"hello"
        with pytest.raises(UpstreamError, match="certificate"):
            await answer_of(server, replace(asks, name="other.internal"))


async def test_a_request_is_served_over_tls_from_gateway_to_engine(
    control_plane: ControlPlane, channel: ChannelSettings
) -> None:
    settings = PoolReplicaSettings(
        pool="short",
        drain_timeout_s=5.0,
        health_timeout_s=5.0,
        server=ReplicaServerSettings(),
        channel=channel,
    )
    engine = EmulatedEngine(EmulatedEngineSettings(served_model_names=("m",), speed_up=100.0))
    replica = PoolReplica("s1", "127.0.0.1", settings, engine, control_plane.locate_for_replica)
    await replica.start()
    client = await control_plane.gateway()
    await wait_until(lambda: len(client.replicas()) == 1)
    app = Gateway(GatewaySettings(models=(ServedModel(name="m"),)), {"m": client}, "g1", tls=channel.tls)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    async with serving(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for streamed in (False, True):
            answer = await http.post("/v1/chat/completions", json={**body, "stream": streamed}, timeout=60)
            assert answer.status_code == 200, answer.text
        assert "[DONE]" in answer.text
    app.close()
    await replica.stop()


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@contextlib.asynccontextmanager
async def encrypted_port(
    tls: TlsSettings, max_connections: int | None = None, overload: Application | None = None
) -> AsyncIterator[tuple[HttpServer, int]]:
    options = HttpServerOptions(
        idle_s=5.0, max_connections=max_connections, overload=overload, tls=Tls(tls).server
    )
    server = HttpServer("a test", asgi_application(hello_world), options)
    sock = listening_socket("127.0.0.1", 0, 1, 256)
    await server.start(sock)
    try:
        yield server, sock.getsockname()[1]
    finally:
        await server.stop(0.0)


# Nothing, one byte, a part of a ClientHello, and no TLS.
@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", REQUEST])
@pytest.mark.parametrize("loop", LOOPS)
def test_half_open_handshakes_count_as_connections_and_time_out(
    loop: Callable[[], asyncio.AbstractEventLoop],
    sent: bytes,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.8)

    async def run() -> None:
        async with encrypted_port(authority.process()) as (server, port), asyncio.timeout(20):
            clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in clients:
                writer.write(sent)
            await asyncio.sleep(0.3)
            # Bytes that are no TLS end the handshake at once.
            assert server.connections == (0 if sent == REQUEST else 20)
            for reader, writer in clients:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
            await wait_until(lambda: server.connections == 0 and not server.tasks)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", LOOPS)
def test_handshakes_are_limited_like_connections(
    loop: Callable[[], asyncio.AbstractEventLoop], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_OVERLOAD_CONNECTIONS", 1)
    client = Tls(authority.process("client")).client

    def overload(exchange: Exchange) -> None:
        exchange.respond(503, [(b"connection", b"close")], b"")

    async def run() -> None:
        async with (
            encrypted_port(authority.process(), 2, overload) as (server, port),
            asyncio.timeout(20),
        ):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await wait_until(lambda: server.connections == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            refused, excess = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await refused.read() == b""
            excess.close()
            writer.write(REQUEST)
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            for _, each in (*silent, (reader, writer)):
                each.close()
            await wait_until(lambda: server.connections == 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_in_the_packet_that_ends_the_handshake_is_answered_encrypted(
    loop: Callable[[], asyncio.AbstractEventLoop], authority: Authority
) -> None:
    context = Tls(authority.process("client")).client

    async def run() -> None:
        async with encrypted_port(authority.process()) as (_, port), asyncio.timeout(20):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(incoming, outgoing)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(65_536))
            tls.write(REQUEST)
            writer.write(outgoing.read())
            answer = b""
            while b"hello" not in answer:
                incoming.write(await reader.read(65_536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer += tls.read(65_536)
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
async def test_stopping_ends_handshakes(authority: Authority, grace_s: float) -> None:
    async with encrypted_port(authority.process()) as (server, port), asyncio.timeout(4):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.1)
        await server.stop(grace_s)
        assert (server.connections, await reader.read()) == (0, b"")
        writer.close()


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    good = authority.process()
    with pytest.raises(SettingsError, match=r"tls\.ca must be an absolute path, got 'ca\.pem'"):
        replace(good, ca="ca.pem")
    with pytest.raises(SettingsError, match=r"cannot use /nothing/ca\.pem"):
        Tls(replace(good, ca="/nothing/ca.pem"))
    other = Authority(tmp_path / "theirs").process("other.internal")
    with pytest.raises(SettingsError, match="KEY_VALUES_MISMATCH"):
        Tls(replace(good, key=other.key))
