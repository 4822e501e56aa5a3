import asyncio
from dataclasses import replace

from tests.serving.channel.harness import FAST, Simulation, granted, until


async def test_a_change_is_reported_and_no_change_is_repeated_only_as_a_sign_of_life(
    world: Simulation,
) -> None:
    _, double = await world.replica("s1")
    reports = 0
    feed = world.live._replicas._feed

    def counted(event: object) -> None:
        nonlocal reports
        reports += 1
        feed(event)  # type: ignore[arg-type]

    world.live._replicas._feed = counted
    looks = double.looks
    await until(lambda: double.looks >= looks + 20)
    assert 0 < reports < 10
    double.report = replace(double.report, waiting=7)
    await until(lambda: world.live.status()["replicas"]["s1"]["report"]["waiting"] == 7)


async def test_a_replica_registers_with_the_next_scheduler(world: Simulation) -> None:
    _, double = await world.replica("s1")
    double.report = replace(double.report, running=3)
    await until(lambda: world.live.status()["replicas"]["s1"]["report"]["running"] == 3)
    await world.restart()
    await until(lambda: world.reported("s1"))
    assert world.live.status()["replicas"]["s1"]["report"]["running"] == 3
    assert world.live.status()["incarnation"] == 2


async def test_a_replica_that_leaves_is_gone_at_once(world: Simulation) -> None:
    client, _ = await world.replica("s1")
    await client.close()
    await until(lambda: world.live.status()["replicas"] == {})


async def test_a_replica_whose_load_is_unknown_becomes_stale_and_takes_no_requests(world: Simulation) -> None:
    gateway = await world.gateway()
    client, double = await world.replica("s1")
    await until(lambda: len(gateway.replicas()) == 1)
    double.broken = True
    await until(lambda: world.live.status()["replicas"]["s1"]["stale"])
    await until(lambda: gateway.replicas() == ())
    assert client.is_connected
    assert 'ewsjf_stale_reports_total{model="m"} 1.0' in await world.live.exposition()
    double.broken = False
    await until(lambda: not world.live.status()["replicas"]["s1"]["stale"])
    await until(lambda: len(gateway.replicas()) == 1)


async def test_the_death_of_an_engine_closes_its_replica_at_once(world: Simulation) -> None:
    gateway = await world.gateway()
    client, double = await world.replica("s1")
    await until(lambda: len(gateway.replicas()) == 1)
    double.engine_failure = "the engine is dead"
    await until(lambda: gateway.replicas() == ())
    assert client.is_connected
    assert world.live.core.ledger.connected_count == 0
    # The replica left at once; its last report never became stale.
    assert 'ewsjf_stale_reports_total{model="m"} 1.0' not in await world.live.exposition()


async def test_a_replica_joins_again_when_its_engine_answers_again(world: Simulation) -> None:
    gateway = await world.gateway()
    _, double = await world.replica("s1")
    double.engine_failure = "the server at http://far gives no answer"
    await until(lambda: world.live.core.ledger.connected_count == 0)
    double.engine_failure = ""
    await until(lambda: [address.replica_id for address in gateway.replicas()] == ["s1"])
    await granted(gateway, "r")


async def test_a_replica_with_a_failed_engine_does_not_register_with_a_new_scheduler(
    world: Simulation,
) -> None:
    client, double = await world.replica("s1")
    double.engine_failure = "the engine is dead"
    await until(lambda: world.live.core.ledger.connected_count == 0)
    await world.restart()
    await until(lambda: client.is_connected)
    looks = double.looks
    await until(lambda: double.looks > looks + 1)
    assert world.live.core.ledger.connected_count == 0


async def test_draining_is_reported_at_once(world: Simulation) -> None:
    client, double = await world.replica("s1")
    double.report = replace(double.report, draining=True)
    client.report_now()
    await until(lambda: not world.live._replicas.table.entries[0].open)


async def test_a_half_open_channel_is_noticed_and_the_replica_joins_again(world: Simulation) -> None:
    wire = await world.wire()
    client, _ = await world.replica("s1", wire=wire)
    wire.mute_up = wire.mute_down = True
    began = asyncio.get_running_loop().time()
    await until(lambda: not client.is_connected and world.live.status()["replicas"] == {})
    assert asyncio.get_running_loop().time() - began > FAST.dead_after_s / 2
    wire.mute_up = wire.mute_down = False
    await until(lambda: world.reported("s1"))
