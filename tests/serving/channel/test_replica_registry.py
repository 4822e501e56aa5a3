"""Replica table: sent once per batch of changes, and always before a grant that refers to it."""

import asyncio

from serve_app.core.events import Event
from serve_app.serving.channel.gateway_sessions import ReplicaRegistry
from serve_app.serving.channel.messages import (
    Granted,
    Register,
    ReplicaTable,
    Report,
    Role,
    SnapshotEnd,
    Submit,
    Welcome,
)
from tests.serving.channel.harness import (
    ControlPlane,
    FakeReplica,
    RawPeer,
    RecordingLink,
    hello,
    submission,
    wait_until,
)

MANY = 1_000


def join(registry: ReplicaRegistry, number: int) -> None:
    """Register a replica with its first report."""
    replica, link = FakeReplica(f"s{number}", "short", 8), RecordingLink()
    for message in (Register(replica.spec, replica.address), Report(replica.report)):
        registry.on_message(replica.spec.replica_id, link, message)  # type: ignore[arg-type]


async def test_replicas_that_change_together_are_sent_in_one_table() -> None:
    events: list[Event] = []
    tables: list[ReplicaTable] = []
    registry = ReplicaRegistry(events.append, tables.append)
    for number in range(MANY):
        join(registry, number)
    await asyncio.sleep(0)
    for number in range(MANY):
        registry.on_stale(f"s{number}")
    await asyncio.sleep(0)
    assert [sum(entry.open for entry in table.entries) for table in tables] == [MANY, 0]


async def test_a_table_never_follows_a_grant_that_refers_to_it(control_plane: ControlPlane) -> None:
    gateway = await RawPeer.at(control_plane.endpoint())
    gateway.send(hello(control_plane.endpoint()), Submit(submission("r1"), 0.0), SnapshotEnd())
    await gateway.receive(Welcome)
    await wait_until(lambda: len(control_plane.live.core.queue) == 1)
    # In one turn of the loop, the replica registers and reports, and the request is granted.
    endpoint, double = control_plane.endpoint(Role.REPLICA), FakeReplica("s1", "short", 8)
    replica = await RawPeer.at(endpoint)
    replica.send(
        hello(endpoint, role=Role.REPLICA, peer_id="s1"),
        Register(double.spec, double.address),
        Report(double.report),
    )
    granted = await gateway.receive(Granted)
    tables = [
        each for each in gateway.received[: gateway.received.index(granted)] if isinstance(each, ReplicaTable)
    ]
    assert [entry.address for entry in tables[-1].entries if entry.open] == [double.address]


async def test_a_gateway_that_joins_in_the_same_iteration_receives_the_current_table() -> None:
    registry = ReplicaRegistry(lambda _: None, lambda _: None)
    join(registry, 0)
    assert [entry.open for entry in registry.table.entries] == [True]
    registry.on_stale("s0")
    assert [entry.open for entry in registry.table.entries] == [False]
