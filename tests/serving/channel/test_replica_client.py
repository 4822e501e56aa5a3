from dataclasses import replace

from serve_app.core.events import ReplicaReported
from tests.serving.channel.harness import ControlPlane, granted, wait_until


async def test_a_change_is_reported_and_no_change_is_repeated_only_as_a_sign_of_life(
    control_plane: ControlPlane,
) -> None:
    _, double = await control_plane.replica("s1")
    reports = control_plane.events(ReplicaReported)
    looks = double.looks
    await wait_until(lambda: double.looks >= looks + 20)
    assert 0 < len(reports) < 10
    double.report = replace(double.report, waiting=7)
    await wait_until(lambda: control_plane.live.status()["replicas"]["s1"]["report"]["waiting"] == 7)


async def test_a_replica_registers_with_the_next_scheduler(control_plane: ControlPlane) -> None:
    _, double = await control_plane.replica("s1")
    double.report = replace(double.report, running=3)
    await wait_until(lambda: control_plane.live.status()["replicas"]["s1"]["report"]["running"] == 3)
    await control_plane.restart()
    await wait_until(lambda: control_plane.reported("s1"))
    assert control_plane.live.status()["replicas"]["s1"]["report"]["running"] == 3
    assert control_plane.live.status()["incarnation"] == 2
    assert 'ewsjf_scheduler_incarnation{model="m"} 2.0' in await control_plane.live.exposition()


async def test_gateways_get_the_context_limit_that_is_registered_last(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    client, double = await control_plane.replica("s1")
    await wait_until(lambda: len(gateway.replicas()) == 1)
    assert gateway.replicas()[0].max_model_len == double.spec.max_model_len
    client.change(replace(double.spec, max_model_len=2_048))
    await wait_until(lambda: [address.max_model_len for address in gateway.replicas()] == [2_048])


async def test_a_replica_that_leaves_is_gone_at_once(control_plane: ControlPlane) -> None:
    client, _ = await control_plane.replica("s1")
    await client.close()
    await wait_until(lambda: control_plane.live.status()["replicas"] == {})


async def test_a_replica_whose_load_is_unknown_becomes_stale_and_takes_no_requests(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    client, double = await control_plane.replica("s1")
    await wait_until(lambda: len(gateway.replicas()) == 1)
    double.broken = True
    await wait_until(lambda: control_plane.live.status()["replicas"]["s1"]["stale"])
    await wait_until(lambda: gateway.replicas() == ())
    assert client.is_connected
    page = await control_plane.live.exposition()
    assert 'ewsjf_stale_reports_total{model="m"} 1.0' in page
    assert 'ewsjf_replicas_stale{model="m"} 1.0' in page
    double.broken = False
    await wait_until(lambda: not control_plane.live.status()["replicas"]["s1"]["stale"])
    await wait_until(lambda: len(gateway.replicas()) == 1)


async def test_a_lost_replica_is_no_longer_a_stale_one(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    client, double = await control_plane.replica("s1")
    await granted(gateway, "r")
    await control_plane.replica("s2")
    double.broken = True
    await wait_until(lambda: control_plane.live.status()["replicas"]["s1"]["stale"])
    await client.close()
    await wait_until(lambda: control_plane.live.core.ledger.connected_count == 1)
    # Its request keeps it in the core.
    assert control_plane.live.core.ledger.get("s1") is not None
    assert 'ewsjf_replicas_stale{model="m"} 0.0' in await control_plane.live.exposition()


async def test_the_death_of_an_engine_closes_its_replica_at_once(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    client, double = await control_plane.replica("s1")
    await wait_until(lambda: len(gateway.replicas()) == 1)
    double.engine_failure = "the engine is dead"
    await wait_until(lambda: gateway.replicas() == ())
    assert client.is_connected
    assert control_plane.live.core.ledger.connected_count == 0
    # The replica left at once; its last report never became stale.
    assert 'ewsjf_stale_reports_total{model="m"} 1.0' not in await control_plane.live.exposition()


async def test_a_replica_joins_again_when_its_engine_answers_again(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    _, double = await control_plane.replica("s1")
    double.engine_failure = "the server at http://far gives no answer"
    await wait_until(lambda: control_plane.live.core.ledger.connected_count == 0)
    double.engine_failure = ""
    await wait_until(lambda: [address.replica_id for address in gateway.replicas()] == ["s1"])
    await granted(gateway, "r")


async def test_a_replica_with_a_failed_engine_does_not_register_with_a_new_scheduler(
    control_plane: ControlPlane,
) -> None:
    client, double = await control_plane.replica("s1")
    double.engine_failure = "the engine is dead"
    await wait_until(lambda: control_plane.live.core.ledger.connected_count == 0)
    await control_plane.restart()
    await wait_until(lambda: client.is_connected)
    looks = double.looks
    await wait_until(lambda: double.looks > looks + 1)
    assert control_plane.live.core.ledger.connected_count == 0


async def test_draining_is_reported_at_once(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    client, double = await control_plane.replica("s1")
    await wait_until(lambda: len(gateway.replicas()) == 1)
    double.report = replace(double.report, draining=True)
    client.report_now()
    await wait_until(lambda: gateway.replicas() == ())
