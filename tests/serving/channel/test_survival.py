"""Fault tolerance: no request is lost, granted twice or answered twice."""

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.core.admission.admission import RESERVED_SHARE
from serve_app.core.decision_log import read_runs, replay
from serve_app.core.events import DispatchFailure
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler.journal import DecisionLogSettings
from tests.serving.channel.harness import (
    FAST,
    PATIENCE_S,
    AwaitedClient,
    ControlPlane,
    Grant,
    Wire,
    granted,
    scheduler_settings,
    submission,
    wait_until,
)

USAGE = Usage(prompt_tokens=10, output_tokens=5)


def submit(client: AwaitedClient, request_id: str, **changes: Any) -> asyncio.Task[Grant | Conclusion]:
    return asyncio.create_task(client.acquire(submission(request_id, **changes)))


async def relayed_gateway(control_plane: ControlPlane) -> tuple[Wire, AwaitedClient]:
    wire = await control_plane.wire()
    return wire, await control_plane.gateway(wire=wire)


async def finish(control_plane: ControlPlane, gateway: AwaitedClient) -> None:
    """Finish the only request, which empties the scheduler."""
    gateway.end("r1", Outcome.COMPLETED, USAGE)
    await wait_until(lambda: len(control_plane.live.core) == 0)


async def answer_of(task: asyncio.Task[Grant | Conclusion]) -> Grant | Conclusion:
    return await asyncio.wait_for(task, PATIENCE_S)


async def test_requests_of_a_gateway_that_stays_away_are_charged_until_their_engine_has_ended_them(
    control_plane: ControlPlane,
) -> None:
    wire = await control_plane.wire()
    gateway, other = await control_plane.gateway("g1", wire=wire), await control_plane.gateway("g2")
    _, engine = await control_plane.replica("s1", seats=1)
    for name in ("r1", "r2"):
        await granted(gateway, name)
    await granted(other, "r3")
    ledger = control_plane.live.core.ledger
    engine.report = replace(engine.report, received=3, running=3)
    wire.rejects = True
    wire.cut()
    await wait_until(lambda: control_plane.live.status()["gateways"] == 1)
    # The engine reports all three as running, so they stay in flight for as long as it does.
    await asyncio.sleep(2 * FAST.gateway_grace_s)
    assert ledger["s1"].in_flight == 3
    engine.report = replace(engine.report, running=2)
    await wait_until(lambda: ledger["s1"].in_flight == 2)
    engine.report = replace(engine.report, running=1)
    await wait_until(lambda: ledger["s1"].in_flight == 1)
    assert [control_plane.live.core.find(name) is None for name in ("r1", "r2", "r3")] == [True, True, False]
    other.end("r3", Outcome.COMPLETED, USAGE)
    await wait_until(lambda: len(control_plane.live.core) == 0)


async def test_the_decision_log_of_a_scheduler_that_ends_requests_of_a_lost_gateway_replays(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    await control_plane.begin(decision_log=DecisionLogSettings(path=str(path)))
    wire, gateway = await relayed_gateway(control_plane)
    _, engine = await control_plane.replica("s1")
    await granted(gateway, "r1")
    engine.report = replace(engine.report, received=1, running=1)
    wire.rejects = True
    wire.cut()
    await wait_until(lambda: control_plane.live.status()["gateways"] == 0)
    await asyncio.sleep(2 * FAST.gateway_grace_s)
    engine.report = replace(engine.report, running=0)
    await wait_until(lambda: len(control_plane.live.core) == 0)
    control_plane.live.stop("the end")
    (run,) = read_runs(path.read_text().splitlines())
    assert replay(run) is None


async def test_a_gateway_that_reconnects_late_finds_its_running_requests(control_plane: ControlPlane) -> None:
    wire, gateway = await relayed_gateway(control_plane)
    _, engine = await control_plane.replica("s1")
    await granted(gateway, "r1")
    engine.report = replace(engine.report, received=1, running=1)
    waiting = [submit(gateway, f"w{number}") for number in range(100)]
    await wait_until(lambda: len(control_plane.live.core) == 101)
    wire.rejects = True
    wire.cut()
    await wait_until(lambda: len(control_plane.live.core) < 101)
    wire.rejects = False
    await wait_until(lambda: len(control_plane.live.core) == 101)
    assert control_plane.live.core.find("r1") is not None
    gateway.end("r1", Outcome.COMPLETED, USAGE)
    await wait_until(lambda: control_plane.live.core.find("r1") is None)
    for task in waiting:
        task.cancel()


async def test_a_gateway_that_sends_goodbye_is_released_at_once(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await granted(gateway, "r1")
    await gateway.close()
    await wait_until(lambda: len(control_plane.live.core) == 0)
    assert control_plane.live.status()["gateways"] == 0


async def test_a_half_open_channel_is_noticed_by_both_ends_and_replaced(control_plane: ControlPlane) -> None:
    wire, gateway = await relayed_gateway(control_plane)
    await control_plane.replica("s1")
    await granted(gateway, "r1")
    wire.mute_up = wire.mute_down = True
    await wait_until(lambda: not gateway.is_connected, "the gateway notices")
    await wait_until(lambda: control_plane.live.status()["gateways"] == 0, "the scheduler notices")
    wire.mute_up = wire.mute_down = False
    await wait_until(lambda: gateway.is_connected)
    assert control_plane.live.core.find("r1") is not None
    await finish(control_plane, gateway)


async def test_a_glitch_of_a_replicas_channel_fails_none_of_its_requests(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    wire = await control_plane.wire()
    await control_plane.replica("s1", wire=wire)
    await granted(gateway, "r1")
    wire.rejects = True
    wire.cut()
    await wait_until(lambda: gateway.replicas() == ())
    waiting = submit(gateway, "r2")
    await wait_until(lambda: len(control_plane.live.core) == 2)
    wire.rejects = False
    assert isinstance(await answer_of(waiting), Grant)
    entry = control_plane.live.core.find("r1")
    assert entry is not None
    assert entry.replica_id == "s1"
    for request_id in ("r1", "r2"):
        gateway.end(request_id, Outcome.COMPLETED, USAGE)
    await wait_until(lambda: len(control_plane.live.core) == 0)


async def test_a_flood_is_rejected_beyond_the_queue_and_leaves_nothing_behind(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    tasks = [submit(gateway, f"r{n}") for n in range(10_000)]
    settings = control_plane.settings
    limit = math.ceil(settings.max_waiting * (1 - RESERVED_SHARE) * settings.admission.tenant_share)
    await wait_until(lambda: sum(task.done() for task in tasks) == 10_000 - limit)
    assert all(
        isinstance(answer := task.result(), Conclusion) and answer.outcome is Outcome.REJECTED_QUEUE_FULL
        for task in tasks
        if task.done()
    )
    assert control_plane.open_requests() == limit
    for task in tasks:
        task.cancel()
    await wait_until(lambda: len(control_plane.live.core) == 0)
    assert control_plane.open_requests() == 0
    assert "waiting 0, running 0" in repr(gateway)


class Handlers:
    """Randomised request handlers at several gateways.

    Attributes:
        results: client results of each request, one per answer.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.results: dict[str, list[str]] = {}

    async def handle(self, gateway: AwaitedClient, request_id: str) -> None:
        results = self.results.setdefault(request_id, [])
        answer = await gateway.acquire(submission(request_id))
        while isinstance(answer, Grant) and self._rng.random() < 0.2:
            answer = await gateway.requeue(request_id, DispatchFailure.UNREACHABLE)
        if isinstance(answer, Conclusion):
            results.append(answer.outcome.value)
            return
        if self._rng.random() < 0.7:
            gateway.begin(request_id)
        try:
            await asyncio.sleep(self._rng.uniform(0, 0.02))
        except asyncio.CancelledError:
            gateway.end(request_id, Outcome.CANCELLED)
            raise
        results.append("completed")
        gateway.end(request_id, Outcome.COMPLETED, USAGE)


@pytest.mark.parametrize("seed", range(3))
async def test_conserves_requests_whatever_breaks_and_whenever(seed: int) -> None:
    """Wires break or go mute, replicas fail, schedulers die, clients disconnect; handlers continue."""
    rng = random.Random(seed)
    control_plane = ControlPlane(scheduler_settings(max_attempts=50), FAST)
    await control_plane.begin()
    wires = [await control_plane.wire() for _ in range(5)]
    gateways = [await control_plane.gateway(f"g{n}", wire) for n, wire in enumerate(wires[:3])]
    for n, wire in enumerate(wires[3:]):
        await control_plane.replica(f"s{n}", wire=wire, seats=4)
    loop = asyncio.get_running_loop()
    handlers = Handlers(rng)
    breaking = loop.create_task(break_on(control_plane, rng, wires))
    tasks = []
    for n in range(150):
        tasks.append(loop.create_task(handlers.handle(gateways[n % 3], f"r{n}")))
        if rng.random() < 0.1:
            loop.call_later(rng.uniform(0, 0.05), tasks[-1].cancel)
        await asyncio.sleep(rng.uniform(0, 0.006))
    breaking.cancel()
    for wire in wires:
        wire.cut()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    await wait_until(lambda: len(control_plane.live.core) == 0, "the scheduler ends empty")
    for n, task in enumerate(tasks):
        wanted = [] if task.cancelled() else ["completed"]
        assert handlers.results.get(f"r{n}", []) == wanted, f"r{n}"
    assert control_plane.open_requests() == 0
    assert all("waiting 0, running 0" in repr(gateway) for gateway in gateways)
    assert control_plane.ends == []
    await control_plane.close()


async def break_on(control_plane: ControlPlane, rng: random.Random, wires: list[Wire]) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.005, 0.05))
        await break_something(control_plane, rng, wires)


async def break_something(control_plane: ControlPlane, rng: random.Random, wires: list[Wire]) -> None:
    wire = rng.choice(wires)
    match rng.choice(("cut", "cut", "mute up", "mute down", "kill")):
        case "cut":
            wire.cut()
        case "mute up":
            # Messages sent now are lost together with the connection.
            wire.mute_up = True
            await asyncio.sleep(rng.uniform(0, 0.02))
            wire.cut()
        case "mute down":
            wire.mute_down = True
            await asyncio.sleep(rng.uniform(0, 0.02))
            wire.cut()
        case "kill":
            if rng.random() < 0.3:
                await control_plane.restart()


async def test_a_burst_from_one_gateway_does_not_delay_others() -> None:
    """Counts messages read before the other gateway is answered: independent of machine load."""
    control_plane = ControlPlane(
        scheduler_settings(), replace(FAST, dead_after_s=PATIENCE_S, stuck_after_s=PATIENCE_S)
    )
    await control_plane.begin()
    loud, quiet = await control_plane.gateway("loud"), await control_plane.gateway("quiet")
    flood = [submit(loud, f"f{n}", priority=PriorityClass.BATCH) for n in range(10_000)]
    await wait_until(lambda: len(control_plane.live.core) > 0, "the flood has begun to come")
    # Metrics would not do: they queue behind the busy gateway's messages.
    assert isinstance(await quiet.acquire(submission("q", no_wait=True)), Conclusion)
    # About 1,000 more were read: those in transit, and a slice for each turn of the loop.
    assert len(control_plane.live.core) + sum(task.done() for task in flood) < len(flood) / 2
    for task in flood:
        task.cancel()
    await wait_until(lambda: len(control_plane.live.core) == 0)
    assert loud.is_connected
    assert quiet.is_connected
    await control_plane.close()
