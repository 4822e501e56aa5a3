"""What requests cost since somebody began to count, whichever schedulers of the model counted it.

A core counts from its own beginning. The sums of those before it are kept here, and with what is learned in
the store. Metrics are made of the core alone: counters begin anew with each process, and Prometheus adds them
up.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.core import Scheduler
from serve_app.core.accounting.costs import OTHERS, TenantTotals
from serve_app.core.routing.snapshot import Snapshot, number, section, sections, text

# As many as a core keeps by name. Tenants come and go over the years, and a file must not grow with them.
_MOST = 1_000
_NAMES = ("pool", "class", "tenant", "seconds")

Row = tuple[str, str, str, float]
"""Pool, class, tenant, and seconds so far."""


@dataclass(frozen=True, slots=True)
class KeptCosts:
    """The sums of earlier schedulers.

    Attributes:
        since: when the first of them began to count, in seconds since 1970.
        used: time of engines.
        imposed: delay of other tenants' requests.
    """

    since: float = field(default_factory=time.time)
    used: tuple[Row, ...] = ()
    imposed: tuple[Row, ...] = ()

    def with_those_of(self, core: Scheduler) -> "KeptCosts":
        """These, and what a scheduler has counted so far."""
        used, imposed = core.in_flight.engine_time.used, core.waits.imposed
        return KeptCosts(self.since, _sum(self.used, used), _sum(self.imposed, imposed))

    def document(self, gpus: Mapping[str, float]) -> dict[str, Any]:
        """What the requests of each tenant cost, by pool and class; the dearest first.

        Args:
            gpus: of a replica, by pool; 0 where it has none.
        """
        used = {row[:3]: row[3] for row in self.used}
        imposed = {row[:3]: row[3] for row in self.imposed}
        worked_s = sum(used.values())
        rows = [
            {
                "pool": pool,
                "class": priority,
                "tenant": tenant,
                "engine_seconds": seconds,
                "gpu_seconds": seconds * gpus[pool] if gpus.get(pool) else None,
                "share": seconds / worked_s if worked_s else 0.0,
                "imposed_delay_seconds": imposed.get((pool, priority, tenant), 0.0),
            }
            for (pool, priority, tenant), seconds in sorted(
                (dict.fromkeys(imposed, 0.0) | used).items(), key=lambda each: -each[1]
            )
        ]
        counted_s = max(0.0, time.time() - self.since)
        return {"since": self.since, "counted_s": counted_s, "engine_seconds": worked_s, "rows": rows}

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        rows = {"used": self.used, "imposed": self.imposed}
        listed = {name: [dict(zip(_NAMES, row, strict=True)) for row in each] for name, each in rows.items()}
        return {"since": self.since, **listed}

    @classmethod
    def restored(cls, document: Snapshot, name: str) -> "KeptCosts":
        """What `state` returned.

        Args:
            name: of the section in the document that has it; a document without one begins to count.

        Raises:
            ValueError: it is no such state.
        """
        if name not in document:
            return cls()
        state = section(document, name)
        since = number(state, "since", at_least=0)
        return cls(since, _rows(state, "used"), _rows(state, "imposed"))


def _rows(state: Snapshot, name: str) -> tuple[Row, ...]:
    return tuple(
        (text(row, "pool"), text(row, "class"), text(row, "tenant"), number(row, "seconds", at_least=0))
        for row in sections(state, name)
    )


def _sum(earlier: tuple[Row, ...], own: TenantTotals) -> tuple[Row, ...]:
    """By pool, class and tenant; the smallest of too many are put together under one name."""
    sums = defaultdict[tuple[str, str, str], float](float)
    for pool, priority, tenant, seconds in earlier:
        sums[pool, priority, tenant] += seconds
    for pool, priority_class, tenant, seconds in own:
        sums[pool, priority_class.value, tenant] += seconds
    if len(sums) > _MOST:
        for key in sorted(sums, key=lambda each: -sums[each])[_MOST:]:
            sums[(*key[:2], OTHERS)] += sums.pop(key)
    return tuple((*key, seconds) for key, seconds in sums.items())
