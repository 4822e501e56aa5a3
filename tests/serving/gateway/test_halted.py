"""Replicas that are halted with their connections open, as clients of the gateway see them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.serving.gateway import UpstreamSettings
from serve_app.serving.gateway import upstream as pool
from tests.serving.channel.harness import scheduler_settings, wait_until

from .builders import MODEL, Engine, chat
from .fleet import Fleet, fleet_of, gathered

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SILENT_S", 0.3)
    monkeypatch.setattr(pool, "_PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pool, "_END_AFTER", 6)


@asynccontextmanager
async def relayed(*engines: Engine) -> AsyncIterator[Fleet]:
    """Run a fleet whose scheduler and gateway notice silence sooner than in production."""
    settings = scheduler_settings(model=MODEL, backpressure=BackpressureSettings(report_limit_s=0.8))
    upstream = UpstreamSettings(connect_timeout_s=2.0, idle_expiry_s=0.6)
    async with (
        fleet_of(engines, settings=settings, upstream=upstream, relayed=True) as fleet,
        asyncio.timeout(40),
    ):
        yield fleet


def halt(fleet: Fleet) -> None:
    """Halt the first replica: it reads and sends nothing, but its connections stay open."""
    fleet.relays[0].partitioned = True
    fleet.fake_replicas[0].broken = True


async def send_request(fleet: Fleet, **changes: Any) -> Any:
    return await fleet.http.post(CHAT, json=chat(**changes))


async def test_requests_without_an_answer_go_to_another_replica() -> None:
    engines = [Engine(token_delay_s=0.2), Engine(token_delay_s=0.2)]
    async with relayed(*engines) as fleet:
        asking = asyncio.create_task(
            gathered(*(send_request(fleet, stream=number % 2 == 0) for number in range(8)))
        )
        fleet.relays[0].partitioned = True
        await asyncio.sleep(0.5)
        assert not engines[0].bodies
        fleet.fake_replicas[0].broken = True
        answers = await asking
        assert {answer.status_code for answer in answers} == {200}
        assert len(engines[1].bodies) == 8
        await wait_until(lambda: len(fleet.core) == 0)
        # It is used again once it responds.
        fleet.relays[0].partitioned = False
        fleet.fake_replicas[0].broken = False
        await asyncio.sleep(1.0)
        await gathered(*(send_request(fleet) for _ in range(8)))
        assert engines[0].bodies


async def test_an_answer_that_has_begun_ends_with_an_error_event() -> None:
    async with relayed(Engine(token_delay_s=0.2)) as fleet:
        async with fleet.http.stream("POST", CHAT, json=chat(stream=True, max_tokens=50)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            halt(fleet)
            rest = [line async for line in lines if line]
        assert "does not respond" in rest[-1]
        assert "send the request again" in rest[-1]
        await wait_until(lambda: len(fleet.core) == 0)


async def test_a_replica_that_responds_keeps_its_requests_without_reports() -> None:
    engine = Engine(token_delay_s=0.6)
    async with relayed(engine) as fleet:
        asking = asyncio.create_task(send_request(fleet, max_tokens=4))
        await asyncio.sleep(0.3)
        fleet.fake_replicas[0].broken = True
        assert (await asking).status_code == 200
        assert sum(b"messages" in body for body in engine.bodies) == 1
        # It has been asked for its health in the meantime.
        assert "/health" in engine.paths
