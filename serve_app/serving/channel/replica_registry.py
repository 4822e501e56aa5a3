"""The scheduler's registry of pool replicas, and the table of them that gateways are given.

A replica that cannot be heard is given no new requests at once; nothing more follows from a lost
connection. What it runs stays in the core's ledger until the gateways, which see it directly, say how it
ended: a glitch of this channel fails no request. When the replica is back it joins again, with the
limits it states then, and finds its running requests still counted. A replica whose engine has failed says
so, and is treated in the same way: its connection stays, and it registers again if the engine answers again.

The table states which replicas are *open*, that is, take new requests. When that has changed for some of
them, all gateways are told once: at the end of the present turn of the event loop, or before a grant, which
refers to the table. A thousand replicas that change together would else be a thousand tables.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.events import Event, ReplicaJoined, ReplicaLost, ReplicaReported
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.errors import ChannelError
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import (
    EngineFailed,
    Message,
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
    """Turns what replicas say into events, and keeps the table."""

    def __init__(self, feed: Callable[[Event], None], tell_gateways: Callable[[ReplicaTable], None]) -> None:
        self._feed = feed
        self._tell_gateways = tell_gateways
        self._loop = asyncio.get_running_loop()
        self._replicas: dict[str, _Replica] = {}
        self._table = ReplicaTable([])
        self._telling: asyncio.Handle | None = None

    def __repr__(self) -> str:
        still_open = sum(replica.open for replica in self._replicas.values())
        return f"<ReplicaRegistry replicas {len(self._replicas)}, open {still_open}>"

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    @property
    def table(self) -> ReplicaTable:
        """The replicas as they are now; all gateways have been told."""
        self.tell_changes()
        return self._table

    def tell_changes(self) -> None:
        """Tell the gateways at once what has changed in this turn of the event loop."""
        if self._telling is None:
            return
        self._telling.cancel()
        self._telling = None
        self._table = ReplicaTable(
            [
                ReplicaEntry(replica.address, replica.open, replica.spec.adapters)
                for replica in self._replicas.values()
            ]
        )
        self._tell_gateways(self._table)

    def stale(self) -> set[str]:
        """Return the connected replicas that have not reported for too long."""
        return {replica_id for replica_id, replica in self._replicas.items() if replica.stale}

    def reports(self) -> dict[str, tuple[ReplicaSpec, ReplicaReport | None]]:
        """Return what each connected replica can hold, and what it last said of itself."""
        return {replica_id: (replica.spec, replica.report) for replica_id, replica in self._replicas.items()}

    def on_message(self, replica_id: str, link: Link, message: Message) -> None:
        """Take one message of a replica that has been let in."""
        if isinstance(message, Register):
            self._register(replica_id, link, message)
        elif isinstance(message, Report):
            self._report(replica_id, message)
        elif isinstance(message, EngineFailed):
            logger.error("event=replica_failed replica=%s reason=%r", replica_id, message.reason)
            self.on_loss(replica_id, link)
        else:
            raise ChannelError(
                f"replica {replica_id} said {type(message).__name__}, which is not a replica's to say"
            )

    def on_loss(self, replica_id: str, link: Link) -> None:
        """A replica's connection is over, or its engine has failed."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.link is link:
            del self._replicas[replica_id]
            self._on_change()
            self._feed(ReplicaLost(replica_id))

    def on_stale(self, replica_id: str) -> None:
        """A replica has not reported for too long; its next report opens it again."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.stale = True
            self._on_change()

    def _register(self, replica_id: str, link: Link, message: Register) -> None:
        spec, address = message.spec, message.address
        if not spec.replica_id == address.replica_id == replica_id or spec.pool != address.pool:
            raise ChannelError(
                f"replica {replica_id} registers as another: {spec}, at {address.host}:{address.port}"
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
        if self._telling is None:
            self._telling = self._loop.call_soon(self.tell_changes)
