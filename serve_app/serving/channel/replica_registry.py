"""The scheduler's registry of pool replicas, and the replica table of the gateways.

A replica that loses its connection receives no new requests, and nothing else follows. Its running requests
stay in the ledger until the gateways, which are connected to it directly, report their ends. A glitch of this
channel thus fails no request. On reconnect the replica joins again with its current limits, and its running
requests keep their holds. A replica whose engine fails reports that and is treated in the same way, but
stays connected and registers again once the engine answers.

The table lists which replicas are *open*, that is, accept new requests. After changes it is sent to all
gateways once: at the end of the current loop iteration, or before a grant, which refers to it. Otherwise a
thousand replicas that change together would cause a thousand tables.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.events import Event, Message, ReplicaJoined, ReplicaLost, ReplicaReported
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.errors import ChannelError
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import (
    EngineFailed,
    Register,
    ReplicaEntry,
    ReplicaTable,
    Report,
)
from serve_app.serving.channel.scheduler_client import ReplicaAddress

logger = logging.getLogger("ray.serve")


@dataclass(slots=True, eq=False)
class _Replica:
    link: Link
    spec: ReplicaSpec
    address: ReplicaAddress
    report: ReplicaReport | None = None
    stale: bool = False

    @property
    def open(self) -> bool:
        return self.report is not None and not (self.report.draining or self.stale)


class ReplicaRegistry:
    """Registry that converts replicas' messages to events and maintains the table."""

    def __init__(self, feed: Callable[[Event], None], publish: Callable[[ReplicaTable], None]) -> None:
        self._feed = feed
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._replicas: dict[str, _Replica] = {}
        self._table = ReplicaTable([])
        self._publishing: asyncio.Handle | None = None

    def __repr__(self) -> str:
        still_open = sum(replica.open for replica in self._replicas.values())
        return f"<ReplicaRegistry replicas {len(self._replicas)}, open {still_open}>"

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    @property
    def table(self) -> ReplicaTable:
        """The current table; pending changes are sent to the gateways first."""
        self.publish_changes()
        return self._table

    def publish_changes(self) -> None:
        """Send pending changes of the table to the gateways now."""
        if self._publishing is None:
            return
        self._publishing.cancel()
        self._publishing = None
        self._table = ReplicaTable(
            [
                ReplicaEntry(replica.address, replica.open, replica.spec.adapters)
                for replica in self._replicas.values()
            ]
        )
        self._publish(self._table)

    def stale(self) -> set[str]:
        """Return the connected replicas whose last report is too old."""
        return {replica_id for replica_id, replica in self._replicas.items() if replica.stale}

    def reports(self) -> dict[str, tuple[ReplicaSpec, ReplicaReport | None]]:
        """Return the limits and the last report of each connected replica."""
        return {replica_id: (replica.spec, replica.report) for replica_id, replica in self._replicas.items()}

    def on_message(self, replica_id: str, link: Link, message: Message) -> None:
        """Handle a message of a connected replica."""
        if isinstance(message, Register):
            self._register(replica_id, link, message)
        elif isinstance(message, Report):
            self._report(replica_id, message)
        elif isinstance(message, EngineFailed):
            logger.error("event=replica_failed replica=%s reason=%r", replica_id, message.reason)
            self.on_loss(replica_id, link)
        else:
            raise ChannelError(f"replica {replica_id} sent an unexpected message: {type(message).__name__}")

    def on_loss(self, replica_id: str, link: Link) -> None:
        """Handle the loss of a replica's connection, or the failure of its engine."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.link is link:
            del self._replicas[replica_id]
            self._on_change()
            self._feed(ReplicaLost(replica_id))

    def on_stale(self, replica_id: str) -> None:
        """Close a replica whose last report is too old; its next report opens it again."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.stale = True
            self._on_change()

    def _register(self, replica_id: str, link: Link, message: Register) -> None:
        spec, address = message.spec, message.address
        if not spec.replica_id == address.replica_id == replica_id or spec.pool != address.pool:
            raise ChannelError(
                f"replica {replica_id} registers with other ids: {spec}, at {address.host}:{address.port}"
            )
        if replica_id in self._replicas:
            del self._replicas[replica_id]
        self._replicas[replica_id] = _Replica(link, spec, address)
        self._on_change()
        self._feed(ReplicaJoined(spec))

    def _report(self, replica_id: str, message: Report) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise ChannelError(f"replica {replica_id} reports before it registers")
        was_open = replica.open
        replica.report, replica.stale = message.report, False
        if replica.open != was_open:
            self._on_change()
        self._feed(ReplicaReported(replica_id, message.report))

    def _on_change(self) -> None:
        if self._publishing is None:
            self._publishing = self._loop.call_soon(self.publish_changes)
