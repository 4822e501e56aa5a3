"""Replica table: sent once per batch of changes, and always before a grant that refers to it."""

import asyncio
from typing import Any

from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.serving.channel.messages import Register, ReplicaTable, Report
from serve_app.serving.channel.replica_registry import ReplicaRegistry
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from tests.serving.channel.harness import ControlPlane, granted, wait_until

MANY = 1_000


class SilentLink:
    """Replica's end of a connection; it never sends."""

    def send(self, _message: Any) -> None:
        """Accept and ignore a message."""


def join(registry: ReplicaRegistry, number: int) -> SilentLink:
    """Register a replica with its first report."""
    replica_id, link = f"s{number}", SilentLink()
    spec = ReplicaSpec(
        replica_id=replica_id, pool="short", max_model_len=1_000, kv_tokens=10_000, max_num_seqs=8
    )
    address = ReplicaAddress(replica_id=replica_id, pool="short", host="10.0.0.1", port=8_000, token="t")
    report = ReplicaReport(received=0, waiting=0, running=0, kv_usage_ratio=0.0)
    registry.on_message(replica_id, link, Register(spec, address))  # type: ignore[arg-type]
    registry.on_message(replica_id, link, Report(report))  # type: ignore[arg-type]
    return link


def count_tables(registry: ReplicaRegistry) -> list[ReplicaTable]:
    """Return the list of all replica tables sent from here on."""
    tables: list[ReplicaTable] = []
    publish = registry._publish

    def count_table(table: ReplicaTable) -> None:
        tables.append(table)
        publish(table)

    registry._publish = count_table
    return tables


async def test_replicas_that_change_together_are_sent_in_one_table(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    registry = control_plane.live._replicas
    tables = count_tables(registry)
    for number in range(MANY):
        join(registry, number)
    await asyncio.sleep(0)
    for number in range(MANY):
        registry.on_stale(f"s{number}")
    await asyncio.sleep(0)
    open_ones = [sum(entry.open for entry in table.entries) for table in tables]
    assert open_ones == [MANY, 0]
    await wait_until(lambda: gateway.replicas() == ())


async def test_a_table_never_follows_a_grant_that_refers_to_it(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    waiting = asyncio.create_task(granted(gateway, "r1"))
    await wait_until(lambda: len(control_plane.live.core.queue) == 1)
    sent: list[str] = []
    session = next(iter(control_plane.live._gateways._gateways.values()))
    assert session.link is not None
    send = session.link.send

    def record(message: Any) -> None:
        sent.append(type(message).__name__)
        send(message)

    session.link.send = record  # type: ignore[method-assign, assignment]
    # In one turn of the loop, the replica registers and reports, and the request is granted.
    join(control_plane.live._replicas, 0)
    assert sent[:2] == ["ReplicaTable", "Granted"]
    assert (await waiting).address.replica_id == "s0"


async def test_a_gateway_that_joins_in_the_same_iteration_receives_the_current_table(
    control_plane: ControlPlane,
) -> None:
    registry = control_plane.live._replicas
    join(registry, 0)
    assert [entry.open for entry in registry.table.entries] == [True]
    registry.on_stale("s0")
    assert [entry.open for entry in registry.table.entries] == [False]
