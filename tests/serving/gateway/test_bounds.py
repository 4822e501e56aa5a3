"""Bounds of docs/security.md as clients reach them; tests of other bounds are beside their modules."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from serve_app.core.events import ReplicaJoined
from serve_app.core.routing.replica import ReplicaReport
from serve_app.engines.engine import Scope, Send
from serve_app.serving import http_server
from serve_app.serving.gateway.answer import stored
from serve_app.serving.gateway.answer.stored import ResponseHolders
from serve_app.serving.http_server import Exchange, HttpServer, HttpServerOptions
from serve_app.serving.listening import listening_socket
from tests.serving.channel.harness import scheduler_settings, wait_until

from .builders import MODEL, Engine, FakeDispatcher, chat, exchange, gateway
from .conftest import GatewayHarness
from .fleet import Fleet, fleet_of, gathered

CHAT = "/v1/chat/completions"
ASKED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER = b'{"status":"ok"}'
SEATS = 2

Answer = asyncio.Task[httpx.Response]


class Gated(Engine):
    """Engine that answers once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        await self.gate.wait()
        await super()._answer(scope, body, send)


def post(
    fleet: Fleet, tenant: str, headers: Mapping[str, str] = MappingProxyType({}), **fields: Any
) -> Answer:
    """Begin a request of a tenant."""
    asked = fleet.http.post(CHAT, json=chat(**fields), headers={"x-tenant": tenant, **headers})
    return asyncio.create_task(asked)


async def limit_seats(fleet: Fleet, engine: Engine) -> None:
    """Let the only replica run few requests, and report others as queued in its engine."""
    (double,) = fleet.fake_replicas
    double.counts = lambda: ReplicaReport(
        received=len(engine.bodies),
        waiting=max(0, engine.running - SEATS),
        running=min(engine.running, SEATS),
        kv_usage_ratio=0.0,
    )
    fleet.control_plane.live.feed(ReplicaJoined(replace(double.spec, max_num_seqs=SEATS)))
    await wait_until(lambda: all(state.report is not None for state in fleet.core.ledger))


async def test_a_tenant_fills_its_share_of_the_queue_and_another_is_queued_and_served() -> None:
    engine, places, count = Gated(), 20, 60
    settings = scheduler_settings(model=MODEL, max_waiting=places)
    async with fleet_of([engine], settings=settings) as fleet, asyncio.timeout(30):
        await limit_seats(fleet, engine)
        heavy = [post(fleet, "heavy") for _ in range(count)]
        waits, queue = fleet.control_plane.open_requests, fleet.core.queue
        await wait_until(lambda: waits() + sum(each.done() for each in heavy) == count)
        admitted, queued = waits(), len(queue)
        assert 0.7 * places <= queued <= 0.8 * places
        light = post(fleet, "light")
        await wait_until(lambda: len(queue) == queued + 1)
        engine.gate.set()
        assert (await light).status_code == 200
        answers = await gathered(*heavy)
        rejected = [each for each in answers if each.status_code != 200]
        assert count - len(rejected) == admitted
        for each in rejected:
            assert (each.status_code, each.json()["error"]["code"]) == (429, "queue_full")
            assert float(each.headers["retry-after"]) > 0


async def test_targets_and_queue_updates_of_requests_that_left_are_forgotten() -> None:
    """Although their times are late, and earlier ones still wait."""
    engine, count = Gated(), 30
    first = {"x-slo-ttft-ms": "80000000", "x-queue-timeout-s": "80000"}
    later = {"x-slo-ttft-ms": "86400000", "x-queue-timeout-s": "86400", "x-ewsjf-queue": "comments"}
    async with fleet_of([engine], settings=scheduler_settings(model=MODEL)) as fleet, asyncio.timeout(30):
        await limit_seats(fleet, engine)
        live, queue, targets = fleet.control_plane.live, fleet.core.queue, fleet.core.targets
        staying = [post(fleet, "stays", first) for _ in range(10)]
        await wait_until(lambda: fleet.control_plane.open_requests() == len(staying))
        for _ in range(3):
            leaving = [post(fleet, "leaves", later, stream=True) for _ in range(count)]
            # Some may be in the engine.
            await wait_until(lambda: len(live._outlook.watched) > count / 2)
            await wait_until(lambda: fleet.control_plane.open_requests() == len(staying) + count)
            for each in leaving:
                each.cancel()
            await wait_until(lambda: fleet.control_plane.open_requests() == len(staying))
        assert 0 < queue.with_targets <= len(staying)
        assert len(live._outlook.watched) == 0
        assert all(len(heap._heap) <= 65 for heap in (fleet.core._expiry, targets._late))
        engine.gate.set()
        assert {each.status_code for each in await gathered(*staying)} == {200}


async def test_connections_far_above_the_limit_are_closed_unanswered_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_OVERLOAD_CONNECTIONS", 1)

    def refuse(refused: Exchange) -> None:
        refused.respond(503, [(b"connection", b"close")], b"")

    options = HttpServerOptions(idle_s=5.0, max_connections=1, overload=refuse)
    server, listener = (
        HttpServer("a test", gateway(FakeDispatcher([])), options),
        listening_socket("127.0.0.1", 0, 1, 16),
    )
    await server.start(listener)
    port = listener.getsockname()[1]
    async with asyncio.timeout(10):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await wait_until(lambda: server.connections == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        for (reader, writer), status in zip(clients, (b"200", b"503"), strict=True):
            writer.write(ASKED)
            assert (await reader.readline()).startswith(b"HTTP/1.1 %b " % status)
    await server.stop(0.0)


async def test_a_head_of_64_kib_is_served_and_a_longer_one_is_rejected(harness: GatewayHarness) -> None:
    assert http_server.MAX_HEAD_BYTES == 65_536
    start = b"GET /health HTTP/1.1\r\nconnection: close\r\nx: "
    head = start.ljust(http_server.MAX_HEAD_BYTES - 4, b"y")
    for end, answer in ((b"\r\n\r\n", b"HTTP/1.1 200 "), (b"y" * 5, b"HTTP/1.1 400 ")):
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        async with asyncio.timeout(10):
            for piece in (head[:65_000], head[65_000:] + end):
                writer.write(piece)
                await asyncio.sleep(0.02)
            assert (await reader.read()).startswith(answer)
        writer.close()
    assert ANSWER in await exchange(harness.port, ASKED.replace(b"host: x", b"connection: close"))


def test_the_responses_that_were_used_least_recently_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MAX_REMEMBERED", 2)
    holders, replicas = ResponseHolders(), FakeDispatcher([1]).replicas()
    for name in ("a", "b", "a", "c"):
        holders.remember(name, "tenant", replicas[0].replica_id)
    assert [holders.find(name, "tenant", replicas) is not None for name in "abc"] == [True, False, True]
