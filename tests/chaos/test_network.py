"""Networks that delay, drop, break and partition, audited by every word of every answer.

Everything is on one event loop with real sockets: a gateway over HTTP, a live scheduler, engines, and relays.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from experiments.common.audit import Ended
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway import UpstreamSettings
from tests.relay import Relay
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.fleet import Fleet, fleet_of

from .audited import MarkedEngine, answers, computed, ends_of

# A peer counts as dead after a second, so that faults which last longer are short enough for a test.
CHANNEL = ChannelSettings(
    heartbeat_interval_s=0.1,
    dead_after_s=0.6,
    stuck_after_s=0.8,
    gateway_grace_s=0.5,
    report_interval_s=0.05,
    backoff_max_s=0.1,
)
OUTAGE_S = 1.8
# Engine silence limit where a fault causes silence; elsewhere a busy machine must not count as silent.
SILENCE_S = 2.0
PATIENCE_S = 60.0
BROKEN, REJECTED = "ended with an error event", "rejected with a reason"

pytestmark = [pytest.mark.application, pytest.mark.timeout(3 * PATIENCE_S)]

Fault = Callable[[Fleet], Awaitable[None]]


@asynccontextmanager
async def bad_network(engines: Sequence[MarkedEngine], silence_s: float = PATIENCE_S) -> AsyncIterator[Fleet]:
    upstream = UpstreamSettings(silence_timeout_s=silence_s, connect_timeout_s=5.0)
    async with fleet_of(engines, channel=CHANNEL, relayed=True, upstream=upstream) as fleet:
        yield fleet


def wire_of(fleet: Fleet) -> Relay:
    assert fleet.wire is not None
    return fleet.wire


async def delayed(fleet: Fleet) -> None:
    wire_of(fleet).delay_s = 0.05
    await asyncio.sleep(OUTAGE_S)


async def partitioned(fleet: Fleet) -> None:
    wire_of(fleet).partitioned = True
    await asyncio.sleep(OUTAGE_S)


async def half_open(fleet: Fleet) -> None:
    """Drop everything on the old connection; new ones work."""
    wire = wire_of(fleet)
    wire.mute_up = wire.mute_down = True
    await asyncio.sleep(OUTAGE_S)


async def deaf_scheduler(fleet: Fleet) -> None:
    wire_of(fleet).mute_up = True
    await asyncio.sleep(OUTAGE_S)


async def deaf_gateway(fleet: Fleet) -> None:
    wire_of(fleet).mute_down = True
    await asyncio.sleep(OUTAGE_S)


async def cut_often(fleet: Fleet) -> None:
    for _ in range(10):
        wire_of(fleet).cut()
        await asyncio.sleep(OUTAGE_S / 10)


async def test_a_bad_network_to_the_scheduler_costs_nothing_but_time() -> None:
    """Each fault lasts longer than a silent gateway keeps its slots."""
    faults = (delayed, partitioned, half_open, deaf_scheduler, deaf_gateway, cut_often)

    async def played(fault: Fault) -> tuple[str, Counter[str], set[int]]:
        engines = [MarkedEngine(token_delay_s=0.02) for _ in range(2)]
        async with bad_network(engines) as fleet:
            sending = asyncio.create_task(answers(fleet, 30, over_s=OUTAGE_S + 0.5))
            await asyncio.sleep(0.3)
            await fault(fleet)
            wire_of(fleet).heal()
            ended = await sending
            await wait_until(lambda: len(fleet.core) == 0, within_s=PATIENCE_S)
            return fault.__name__, ends_of(ended), set(computed(engines).values())

    async with asyncio.timeout(2 * PATIENCE_S):
        found = await asyncio.gather(*map(played, faults))
    assert found == [(fault.__name__, {"answered": 30}, {1}) for fault in faults]


async def rejecting(relay: Relay) -> None:
    relay.rejects = True
    relay.cut()


async def black_hole(relay: Relay) -> None:
    relay.mute_up = relay.mute_down = True


async def partition(relay: Relay) -> None:
    relay.partitioned = True


async def cut_once(relay: Relay) -> None:
    relay.cut()


async def slow(relay: Relay) -> None:
    relay.delay_s = 0.03


async def test_a_bad_network_to_a_replica_is_reported_or_recovered() -> None:
    """Started streams end with an error event, silent ones with 504; the rest is dispatched elsewhere."""
    allowed_ends = {
        slow: set[str](),
        rejecting: {BROKEN},
        cut_once: {BROKEN},
        black_hole: {BROKEN, REJECTED},
        partition: {BROKEN, REJECTED},
    }

    async def played(fault: Callable[[Relay], Awaitable[None]], also: set[str]) -> None:
        engines = [MarkedEngine(token_delay_s=0.02) for _ in range(2)]
        silence_s = SILENCE_S if REJECTED in also else PATIENCE_S
        async with bad_network(engines, silence_s) as fleet:
            sending = asyncio.create_task(answers(fleet, 30, over_s=OUTAGE_S))
            await asyncio.sleep(0.3)
            await fault(fleet.relays[0])
            ended = await sending
            ends = ends_of(ended)
            assert set(ends) <= {"answered", *also}, (fault, ends)
            assert ends["answered"] >= 10, (fault, ends)
            assert all("504: the engine did not answer in time" in one.detail for one in rejected(ended))
            # Silent requests are not computed again; those of a dead connection may be, since their answers
            # were lost.
            assert max(computed(engines).values()) <= 2
            await wait_until(lambda: len(fleet.core) == 0, within_s=PATIENCE_S)
            await serves_again(fleet, engines[0])

    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(*(played(fault, also) for fault, also in allowed_ends.items()))


async def serves_again(fleet: Fleet, engine: MarkedEngine) -> None:
    """Wait until the healed replica serves requests again and no client sees an effect of the fault."""
    fleet.relays[0].heal()
    before, rounds, ends = len(engine.bodies), 0, Counter[str]()
    while len(engine.bodies) == before or set(ends) != {"answered"}:
        rounds += 1
        ends = ends_of(await answers(fleet, 5, 0.2, label=f"later{rounds}."))


def rejected(ended: Sequence[Ended]) -> list[Ended]:
    return [one for one in ended if one.end == REJECTED]


async def campaign(seed: int, seconds: float) -> None:
    """Inject random faults on every connection while requests arrive."""
    rng = random.Random(seed)
    engines = [MarkedEngine(token_delay_s=0.01) for _ in range(3)]
    async with bad_network(engines) as fleet:
        sending = asyncio.create_task(answers(fleet, round(30 * seconds), over_s=seconds))
        breaking = asyncio.create_task(break_on(rng, [wire_of(fleet), *fleet.relays]))
        ended = await sending
        breaking.cancel()
        wrong = [one for one in ended if one.end not in {"answered", BROKEN, REJECTED}]
        assert wrong == []
        assert ends_of(ended)["answered"] > len(ended) / 2, Counter(one.detail for one in ended)
        for relay in (wire_of(fleet), *fleet.relays):
            relay.heal()
            relay.cut()
        await wait_until(lambda: len(fleet.core) == 0, within_s=PATIENCE_S)
        await wait_until(lambda: not any(engine.running for engine in engines), within_s=PATIENCE_S)
        late = await answers(fleet, 10, 0.2, label="later")
        assert [one for one in late if one.end != "answered"] == []


async def break_on(rng: random.Random, relays: Sequence[Relay]) -> None:
    while True:
        relay = rng.choice(relays)
        match rng.choice(("delay", "cut", "partition", "reject", "mute")):
            case "delay":
                relay.delay_s = rng.uniform(0, 0.05)
            case "cut":
                relay.cut()
            case "partition":
                relay.partitioned = True
            case "reject":
                await rejecting(relay)
            case "mute":
                relay.mute_up, relay.mute_down = rng.choice([(True, True), (True, False), (False, True)])
        await asyncio.sleep(rng.uniform(0.02, 1.0))
        relay.heal()


async def test_whatever_the_network_does_no_answer_is_lost_doubled_cut_or_swapped() -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(*(campaign(seed, 3.0) for seed in range(2)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))
async def test_whatever_the_network_does_for_a_minute(seed: int) -> None:
    await campaign(seed, 60.0)
