import asyncio
from typing import Any

import pytest

from serve_app.core.events import Cancelled
from serve_app.serving.channel.link import encode_frames
from serve_app.serving.channel.messages import (
    Heartbeat,
    PeerRejected,
    Register,
    ReplicaTable,
    Report,
    Role,
    SnapshotEnd,
    Welcome,
)
from tests.serving.channel.harness import (
    FAST,
    ControlPlane,
    FakeReplica,
    RawPeer,
    hello,
    permits_socket_filters,
    wait_until,
)


async def test_a_peer_with_the_secret_is_accepted_and_gets_the_replicas(control_plane: ControlPlane) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint()))
    assert (await raw_peer.receive(Welcome)).incarnation == 1
    assert (await raw_peer.receive(ReplicaTable)).entries == []


@pytest.mark.parametrize(
    ("owner", "changes"),
    [(Role.GATEWAY, {"secret": "guess"}), (Role.REPLICA, {"role": Role.GATEWAY})],
    ids=["a guess", "the secret of replicas"],
)
async def test_a_wrong_secret_stops_nothing_and_is_rejected_without_a_hint_of_the_right_one(
    control_plane: ControlPlane, owner: Role, changes: dict[str, Any]
) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint(owner), highest_incarnation=7, **changes))
    reason = (await raw_peer.receive(PeerRejected)).reason
    assert "wrong secret" in reason
    assert control_plane.endpoint().secret not in reason
    assert await raw_peer.closed()
    assert control_plane.ends == []
    assert control_plane.endpoint().incarnation == 1


async def test_a_scheduler_that_sees_a_higher_incarnation_stops_for_ever(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint(), highest_incarnation=7))
    assert "superseded by 7" in (await raw_peer.receive(PeerRejected)).reason
    await wait_until(lambda: control_plane.ends == ["incarnation 1 is superseded by 7"])
    await wait_until(lambda: not gateway.is_connected, "its peers are sent away")
    with pytest.raises(Exception, match="superseded by 7"):
        control_plane.endpoint()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x10\x01" + b"x" * 5000,
        b"\x00" * 64,
        encode_frames([Cancelled("r1")], 100),
    ],
    ids=["http", "rubbish", "more than an unauthenticated peer may send", "empty frames", "no hello"],
)
async def test_garbage_closes_the_connection_and_nothing_else(
    control_plane: ControlPlane, data: bytes
) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send_bytes(data)
    assert await raw_peer.closed()
    assert (await control_plane.gateway()).is_connected


async def test_a_gateway_may_not_speak_as_a_replica(control_plane: ControlPlane) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    double = FakeReplica("s1", "short", 8)
    raw_peer.send(hello(control_plane.endpoint()), Register(double.spec, double.address))
    assert await raw_peer.closed()
    assert control_plane.live.status()["replicas"] == {}


async def test_a_replica_may_not_register_under_anothers_name_nor_report_before_it_registers(
    control_plane: ControlPlane,
) -> None:
    double = FakeReplica("s1", "short", 8)
    for message in (Register(double.spec, double.address), Report(double.report)):
        raw_peer = await RawPeer.at(control_plane.endpoint())
        raw_peer.send(hello(control_plane.endpoint(Role.REPLICA), role=Role.REPLICA, peer_id="s2"), message)
        assert await raw_peer.closed()
    assert control_plane.live.status()["replicas"] == {}


async def test_a_peer_that_opens_a_second_connection_loses_the_first(control_plane: ControlPlane) -> None:
    first = await RawPeer.at(control_plane.endpoint())
    first.send(hello(control_plane.endpoint()), SnapshotEnd())
    await first.receive(Welcome)
    second = await RawPeer.at(control_plane.endpoint())
    second.send(hello(control_plane.endpoint()), SnapshotEnd())
    await second.receive(Welcome)
    assert await first.closed()
    assert control_plane.live.status()["gateways"] == 1


async def test_a_busy_peer_is_borne_for_a_while(control_plane: ControlPlane) -> None:
    loop = asyncio.get_running_loop()
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint()), SnapshotEnd())
    await raw_peer.receive(Welcome)
    # The kernel acknowledges the heartbeats, but the peer answers none.
    began = loop.time()
    assert await raw_peer.closed()
    assert loop.time() - began > FAST.stuck_after_s - 0.3


@pytest.mark.skipif(not permits_socket_filters(), reason="this user may not filter the packets of a socket")
async def test_a_peer_whose_host_is_gone_is_cut_off_within_about_the_limit(
    control_plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ray.serve")
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint()), SnapshotEnd())
    await raw_peer.receive(Welcome)
    raw_peer.vanish()
    await wait_until(lambda: control_plane.live.status()["gateways"] == 0)
    (line,) = [record.getMessage() for record in caplog.records if "event=peer_lost" in record.getMessage()]
    silent_s = float(line.split("no data from the peer for ")[1].split(" s")[0])
    assert FAST.dead_after_s <= silent_s < FAST.stuck_after_s


async def test_a_peer_that_talks_and_does_not_listen_is_cut_off(control_plane: ControlPlane) -> None:
    raw_peer = await RawPeer.at(control_plane.endpoint())
    raw_peer.send(hello(control_plane.endpoint()), SnapshotEnd())

    async def send_heartbeats() -> None:
        while True:
            raw_peer.send(Heartbeat(0))
            await asyncio.sleep(0.05)

    talking = asyncio.create_task(send_heartbeats())
    assert await raw_peer.closed()
    talking.cancel()
