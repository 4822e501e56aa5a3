import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from serve_app.engines.engine import Receive, Scope, Send, read_body
from serve_app.errors import EngineError
from serve_app.serving.gateway.request.endpoints import FORMS, SCHEDULED, UNSCHEDULED
from serve_app.serving.pool import ReplicaGuard, ReplicaServer, ReplicaServerSettings

TOKEN = "a-long-secret"
HEADERS = {"x-replica-token": TOKEN}


class SlowStream:
    """Engine app that sends one chunk, then waits until it is released or its client disconnects."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.ended = asyncio.Event()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body = await read_body(receive)
        assert body is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{len(body)}\n".encode(), "more_body": True})
        leave = asyncio.ensure_future(receive())
        end = asyncio.create_task(self.may_end.wait())
        try:
            await asyncio.wait([leave, end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leave.cancel()
            end.cancel()
            self.ended.set()
        await send({"type": "http.response.body", "body": b"end"})


@pytest.fixture
def engine() -> SlowStream:
    return SlowStream()


@pytest.fixture
def guard(engine: SlowStream) -> ReplicaGuard:
    return ReplicaGuard(engine, TOKEN)


@pytest.fixture
async def server(guard: ReplicaGuard) -> AsyncIterator[ReplicaServer]:
    running = ReplicaServer(guard, "127.0.0.1", ReplicaServerSettings())
    await running.start()
    yield running
    await running.stop(0.1)


@pytest.fixture
async def client(server: ReplicaServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        yield session


@pytest.mark.parametrize("headers", [{}, {"x-replica-token": "wrong"}, {"x-replica-token": ""}])
async def test_a_caller_without_the_token_never_reaches_the_engine(
    client: aiohttp.ClientSession, engine: SlowStream, guard: ReplicaGuard, headers: dict[str, str]
) -> None:
    async with client.post("/v1/completions", headers=headers) as response:
        assert response.status == 401
    assert engine.paths == []
    assert guard.received == 0


async def test_a_chunk_arrives_before_the_answer_ends(
    client: aiohttp.ClientSession, engine: SlowStream, guard: ReplicaGuard
) -> None:
    async with client.post("/v1/completions", headers=HEADERS, data=b"x" * 3_000_000) as response:
        assert await response.content.readline() == b"3000000\n"
        assert repr(guard) == "ReplicaGuard(open, received=1, open_requests=1)"
        engine.may_end.set()
        assert await response.content.read() == b"end"
    assert guard.open_requests == 0


async def test_the_scheduled_requests_count_as_received(
    client: aiohttp.ClientSession, engine: SlowStream, guard: ReplicaGuard
) -> None:
    engine.may_end.set()
    scheduled = [("POST", path) for path in (*SCHEDULED, *FORMS)]
    others = [("GET", "/v1/models"), ("GET", "/v1/responses"), ("POST", "/v1/responses/r1/cancel")]
    for method, path in [*scheduled, *others, *(("POST", path) for path in UNSCHEDULED)]:
        async with client.request(method, path, headers=HEADERS) as response:
            await response.read()
    assert len(engine.paths) == len(scheduled) + len(others) + len(UNSCHEDULED)
    assert guard.received == len(scheduled)


async def test_a_client_that_leaves_is_seen_by_the_engine(
    client: aiohttp.ClientSession, engine: SlowStream, guard: ReplicaGuard
) -> None:
    response = await client.post("/v1/completions", headers=HEADERS)
    await response.content.readline()
    response.close()
    await asyncio.wait_for(engine.ended.wait(), 5)
    await asyncio.wait_for(guard.wait_until_idle(), 5)
    assert guard.open_requests == 0


async def test_a_draining_replica_rejects_new_work_and_completes_the_old(
    client: aiohttp.ClientSession, engine: SlowStream, guard: ReplicaGuard
) -> None:
    async with client.post("/v1/completions", headers=HEADERS) as old:
        await old.content.readline()
        guard.draining = True
        async with client.post("/v1/completions", headers=HEADERS) as new:
            assert new.status == 503
            assert new.headers["x-replica-draining"] == "1"
        idle = asyncio.create_task(guard.wait_until_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        engine.may_end.set()
        assert await old.content.read() == b"end"
    await asyncio.wait_for(idle, 5)
    assert guard.received == 1


async def test_a_connection_is_kept_alive_and_reused(server: ReplicaServer, engine: SlowStream) -> None:
    engine.may_end.set()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-replica-token: {TOKEN}\r\nContent-Length: 0\r\n\r\n"
    )
    for _ in range(3):
        writer.write(request.encode())
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
    writer.close()
    assert len(engine.paths) == 3


async def test_stopping_cuts_a_stream_that_outlives_its_grace(
    server: ReplicaServer, client: aiohttp.ClientSession, engine: SlowStream
) -> None:
    response = await client.post("/v1/completions", headers=HEADERS)
    await response.content.readline()
    await asyncio.wait_for(server.stop(0.1), 10)
    await asyncio.wait_for(engine.ended.wait(), 5)
    with pytest.raises(EngineError, match="has ended"):
        server.check_health()


async def test_a_port_that_is_taken_is_rejected_with_its_number(guard: ReplicaGuard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=str(port)):
            await ReplicaServer(guard, "127.0.0.1", ReplicaServerSettings(port=port, ports=1)).start()


async def test_a_server_that_was_not_started_is_not_healthy(guard: ReplicaGuard) -> None:
    with pytest.raises(EngineError, match="not been started"):
        ReplicaServer(guard, "127.0.0.1", ReplicaServerSettings()).check_health()


async def test_a_malformed_request_is_rejected_and_the_server_continues(
    server: ReplicaServer, client: aiohttp.ClientSession, engine: SlowStream
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"\x00\x01 nonsense\r\n\r\n")
    assert b"400" in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    engine.may_end.set()
    async with client.get("/health", headers=HEADERS) as response:
        assert response.status == 200


def test_an_empty_token_is_rejected(engine: SlowStream) -> None:
    with pytest.raises(ValueError, match="token"):
        ReplicaGuard(engine, "")


def test_settings_out_of_range_are_rejected() -> None:
    with pytest.raises(ValueError, match="70000"):
        ReplicaServerSettings(port=70_000)


async def test_a_head_without_an_end_is_rejected(server: ReplicaServer, engine: SlowStream) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nlong: ")

    async def send() -> None:
        for _ in range(64):
            writer.write(b"x" * 65536)
            await writer.drain()

    sending = asyncio.create_task(send())
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        with contextlib.suppress(ConnectionError):
            await sending
    writer.close()
    assert engine.paths == []


async def test_many_short_headers_are_rejected_as_well(server: ReplicaServer, engine: SlowStream) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 500_000)
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    assert engine.paths == []
