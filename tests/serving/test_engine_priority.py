"""A priority from the client's class to the engine's own queue, over real sockets and without Ray."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from serve_app.core.dispatch.engine_priority import EnginePrioritySettings
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import EngineLimits
from serve_app.engines.model import SchedulingPolicy
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from tests.serving.channel.harness import FAST, Simulation, scheduler_settings, until
from tests.serving.gateway.builders import serving

BACKLOG = 6
# One sequence at a time, at 4 ms a token.
ENGINE = EmulatedEngineSettings(
    served_model_names=("m",), max_num_seqs=1, scheduling_policy=SchedulingPolicy.PRIORITY
)


@dataclass
class Stage:
    """Gateway, scheduler and an engine that orders its own queue."""

    http: httpx.AsyncClient
    engine: EmulatedEngine

    async def load(self) -> ReplicaReport:
        load = await self.engine.load()
        return ReplicaReport(
            received=0, waiting=load.waiting, running=load.running, kv_usage_ratio=load.kv_usage_ratio
        )

    async def ask(self, ended: list[int], priority: int, tokens: int) -> None:
        body = {"model": "m", "prompt": "Hi", "max_tokens": tokens, "ignore_eos": True, "priority": priority}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        ended.append(priority)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    engine = EmulatedEngine(ENGINE)
    limits = await engine.start()
    mode = EnginePrioritySettings(enabled=True)
    world = Simulation(scheduler_settings(policy="fcfs", engine_priority=mode), FAST)
    await world.begin()
    async with serving(engine.app) as engine_port:
        made = Stage(httpx.AsyncClient(timeout=30), engine)
        replica = ReplicaClient(spec(limits), address(engine_port), world.locate_for_replica, made.load, FAST)
        replica.start()
        await until(lambda: world.reported("s1"), "the replica reports")
        dispatcher = await world.gateway()
        app = Gateway(GatewaySettings(models=(ServedModel(name="m"),)), {"m": dispatcher}, "g1")
        async with serving(app) as port:
            made.http.base_url = httpx.URL(f"http://127.0.0.1:{port}")
            yield made
            await made.http.aclose()
        app.close()
        await replica.close()
        await world.close()
    await engine.stop()


def spec(limits: EngineLimits) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id="s1",
        pool="short",
        max_model_len=limits.max_model_len,
        kv_tokens=limits.kv_tokens,
        max_num_seqs=limits.max_num_seqs,
    )


def address(port: int) -> ReplicaAddress:
    return ReplicaAddress(replica_id="s1", pool="short", host="127.0.0.1", port=port, token="t")


async def test_an_urgent_request_overtakes_a_backlog_that_the_engine_has_already(stage: Stage) -> None:
    ended: list[int] = []
    backlog = [asyncio.create_task(stage.ask(ended, 5, 500)) for _ in range(BACKLOG)]
    async with asyncio.timeout(30):
        while (await stage.engine.load()).waiting < BACKLOG - 1:  # noqa: ASYNC110 - the engine tells no more
            await asyncio.sleep(0.01)
    before = len(ended)
    await stage.ask(ended, -1, 2)
    # Whoever ran had to end; nobody who waited in the engine went first.
    assert ended.index(-1) <= before + 1
    for task in backlog:
        task.cancel()
    await asyncio.gather(*backlog, return_exceptions=True)
