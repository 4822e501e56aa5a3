"""Pool replica with its real server and channel, connected to a real scheduler."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings import SchedulerSettings
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import ASGIApp, EngineLimits, EngineLoad
from serve_app.errors import EngineError, Outcome
from serve_app.request import PromptShape, RequestSpec, Submission
from serve_app.serving.channel.connector import Locate
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.pool import PoolReplica, PoolReplicaSettings, ReplicaServerSettings
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from tests.serving.channel.harness import AwaitedClient, Grant, wait_until

CHANNEL = ChannelSettings()
ENGINE = EmulatedEngineSettings(served_model_names=("demo",), profile="laptop", max_model_len=2_048)


def settings(**changes: float) -> PoolReplicaSettings:
    times = {"drain_timeout_s": 20.0, "health_timeout_s": 5.0, **changes}
    return PoolReplicaSettings(
        pool="short",
        drain_timeout_s=times["drain_timeout_s"],
        health_timeout_s=times["health_timeout_s"],
        server=ReplicaServerSettings(),
        channel=CHANNEL,
    )


@pytest.fixture
async def live() -> AsyncIterator[LiveScheduler]:
    scheduler = SchedulerSettings(model="demo", routing=RoutingSettings(pools=("short",)))
    running = LiveScheduler(scheduler, LiveSchedulerOptions(incarnation=1, channel=CHANNEL))
    await running.start("127.0.0.1")
    yield running
    running.stop()


@pytest.fixture
async def gateway(live: LiveScheduler) -> AsyncIterator[AwaitedClient]:
    client = AwaitedClient("gateway-1", locator(live, Role.GATEWAY), CHANNEL)
    client.start()
    yield client
    await client.close()


def locator(live: LiveScheduler, role: Role = Role.REPLICA) -> Locate:
    async def locate() -> SchedulerEndpoint:
        return live.endpoint(role)

    return locate


async def granted(gateway: AwaitedClient, name: str) -> Grant:
    shape = PromptShape(text_bytes=40)
    submission = Submission(
        request_id=name, spec=RequestSpec(model="demo", shape=shape, max_output_tokens=100)
    )
    grant = await asyncio.wait_for(gateway.acquire(submission), 10)
    assert isinstance(grant, Grant)
    return grant


def url(grant: Grant) -> str:
    return f"http://{grant.address.host}:{grant.address.port}/v1/completions"


def body(tokens: int) -> dict[str, object]:
    return {"model": "demo", "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}


def reported_running(live: LiveScheduler) -> int:
    reports = [replica["report"] for replica in live.status()["replicas"].values()]
    return sum(report["running"] or 0 for report in reports if report is not None)


async def test_a_replica_joins_serves_what_is_granted_and_drains(
    live: LiveScheduler, gateway: AwaitedClient
) -> None:
    replica = PoolReplica("replica-1", "127.0.0.1", settings(), EmulatedEngine(ENGINE), locator(live))
    await replica.start()
    grant = await granted(gateway, "first")
    assert (grant.dispatch.pool, grant.dispatch.replica_id) == ("short", "replica-1")
    async with httpx.AsyncClient(headers={"x-replica-token": grant.address.token}) as http:
        running = asyncio.create_task(http.post(url(grant), json=body(400), timeout=30))
        await wait_until(lambda: reported_running(live) == 1)

        stopping = asyncio.create_task(replica.stop())
        await wait_until(lambda: not gateway.replicas())
        rejected = await http.post(url(grant), json=body(1))
        assert (rejected.status_code, rejected.headers["x-replica-draining"]) == (503, "1")
        assert not stopping.done()

        answer = await running
        assert answer.json()["usage"]["completion_tokens"] == 400
        await asyncio.wait_for(stopping, 10)
        with pytest.raises(httpx.ConnectError):
            await http.post(url(grant), json=body(1))
    gateway.end("first", Outcome.COMPLETED)


async def test_adapters_that_its_engine_lists_are_reported_as_they_change(
    live: LiveScheduler, gateway: AwaitedClient
) -> None:
    engine = EmulatedEngine(replace(ENGINE, lora_modules=("sql",)))
    replica = PoolReplica("replica-1", "127.0.0.1", settings(), engine, locator(live))
    await replica.start()
    await wait_until(lambda: dict(gateway.adapters()) == {"sql": {"replica-1"}})
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        await http.post("/v1/load_lora_adapter", json={"lora_name": "later", "lora_path": "/later"})
        await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    await wait_until(lambda: dict(gateway.adapters()) == {"later": {"replica-1"}})
    await wait_until(lambda: len(gateway.replicas()) == 1)
    await replica.stop()
    await wait_until(lambda: not gateway.adapters())


async def test_a_drain_ends_in_time_though_an_answer_does_not(
    live: LiveScheduler, gateway: AwaitedClient
) -> None:
    replica = PoolReplica(
        "replica-1", "127.0.0.1", settings(drain_timeout_s=0.3), EmulatedEngine(ENGINE), locator(live)
    )
    await replica.start()
    grant = await granted(gateway, "endless")
    async with httpx.AsyncClient(headers={"x-replica-token": grant.address.token}) as http:
        running = asyncio.create_task(http.post(url(grant), json=body(2_000), timeout=30))
        await wait_until(lambda: reported_running(live) == 1)
        await asyncio.wait_for(replica.stop(), 10)
        (cut,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(cut, httpx.HTTPError) or (isinstance(cut, httpx.Response) and cut.status_code >= 500)


async def test_a_replica_joins_a_scheduler_that_starts_later(
    gateway: AwaitedClient, live: LiveScheduler
) -> None:
    known: list[LiveScheduler] = []

    async def locate() -> SchedulerEndpoint:
        if not known:
            raise ConnectionError("no scheduler yet")
        return known[0].endpoint(Role.REPLICA)

    replica = PoolReplica("replica-1", "127.0.0.1", settings(), EmulatedEngine(ENGINE), locate)
    await replica.start()
    await asyncio.sleep(0.3)
    await replica.check_health()
    assert gateway.replicas() == ()
    known.append(live)
    await wait_until(lambda: len(gateway.replicas()) == 1)
    await replica.stop()


class BrokenEngine:
    """Engine with one broken part; counts its stops."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.stops = 0

    async def start(self) -> EngineLimits:
        if self.fault == "start":
            raise EngineError("out of memory")
        kv_tokens = 0 if self.fault == "limits" else 1_000
        return EngineLimits(max_model_len=100, kv_tokens=kv_tokens, max_num_seqs=4)

    @property
    def app(self) -> ASGIApp:
        async def nothing(scope: object, receive: object, send: object) -> None:
            raise RuntimeError("this engine is never called")

        return nothing

    async def load(self) -> EngineLoad:
        if self.fault == "load":
            raise EngineError("no statistics")
        return EngineLoad(waiting=0, running=0, kv_usage_ratio=0.0)

    async def check_health(self) -> None:
        if self.fault == "health":
            raise EngineError("the engine is dead")
        if self.fault == "silence":
            await asyncio.sleep(math.inf)

    async def stop(self) -> None:
        self.stops += 1


async def test_an_engine_that_cannot_start_fails_the_start_of_its_replica(live: LiveScheduler) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        await PoolReplica("replica-1", "127.0.0.1", settings(), BrokenEngine("start"), locator(live)).start()


async def test_an_engine_is_freed_when_its_replica_cannot_join(live: LiveScheduler) -> None:
    engine = BrokenEngine("limits")
    with pytest.raises(ValueError, match="kv_tokens"):
        await PoolReplica("replica-1", "127.0.0.1", settings(), engine, locator(live)).start()
    assert engine.stops == 1


async def test_a_dead_engine_makes_its_replica_unhealthy(live: LiveScheduler) -> None:
    replica = PoolReplica("replica-1", "127.0.0.1", settings(), BrokenEngine("health"), locator(live))
    with pytest.raises(EngineError, match="not been started"):
        await replica.check_health()
    await replica.start()
    with pytest.raises(EngineError, match="the engine is dead"):
        await replica.check_health()
    await replica.stop()


async def test_an_engine_that_does_not_answer_makes_its_replica_unhealthy(live: LiveScheduler) -> None:
    replica = PoolReplica(
        "replica-1", "127.0.0.1", settings(health_timeout_s=0.1), BrokenEngine("silence"), locator(live)
    )
    await replica.start()
    with pytest.raises(EngineError, match=r"took over 0\.1 s"):
        await replica.check_health()
    await replica.stop()


async def test_a_replica_whose_load_stays_unknown_is_unhealthy(
    live: LiveScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.serving.pool._MISSED_READINGS", 2)
    replica = PoolReplica("replica-1", "127.0.0.1", settings(), BrokenEngine("load"), locator(live))
    await replica.start()
    await asyncio.sleep(1.0)
    with pytest.raises(EngineError, match="load has been unknown"):
        await replica.check_health()
    await replica.stop()
