"""Persistent cost attribution, accumulated over all schedulers of a model.

A core counts from its own start. The sums of its predecessors are stored here, and persisted with learned
state. Metrics use the core's counts alone: Prometheus handles counters that restart with a process.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.core import Scheduler
from serve_app.core.accounting.costs import OTHERS, TenantTotals
from serve_app.core.routing.snapshot import Snapshot, number, section, sections, text

# The same number of names as in a core, so that the file does not grow with tenants over the years.
_MOST = 1_000
_NAMES = ("pool", "class", "tenant", "seconds")

Row = tuple[str, str, str, float]
"""Pool, class, tenant and accumulated seconds."""


@dataclass(frozen=True, slots=True)
class PersistentCosts:
    """Accumulated costs of earlier schedulers since a time in seconds since the epoch.

    They are engine time, and the delay imposed on requests of other tenants.
    """

    since: float = field(default_factory=time.time)
    used: tuple[Row, ...] = ()
    imposed: tuple[Row, ...] = ()

    def plus(self, core: Scheduler) -> "PersistentCosts":
        """Return these costs plus those counted by a scheduler so far."""
        used, imposed = core.in_flight.engine_time.used, core.waits.imposed
        return PersistentCosts(self.since, _sum(self.used, used), _sum(self.imposed, imposed))

    def document(self, gpus: Mapping[str, float]) -> dict[str, Any]:
        """Return each tenant's costs by pool and class, highest first; `gpus` are those of one replica."""
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
        """Return the state as plain values."""
        rows = {"used": self.used, "imposed": self.imposed}
        listed = {name: [dict(zip(_NAMES, row, strict=True)) for row in each] for name, each in rows.items()}
        return {"since": self.since, **listed}

    @classmethod
    def restored(cls, document: Snapshot, name: str) -> "PersistentCosts":
        """Restore what `state` returned.

        Args:
            name: section of the document; if it is absent, the count starts now.

        Raises:
            ValueError: the section is invalid.
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
    """Add up costs by pool, class and tenant; beyond the limit, the smallest are merged under one name."""
    sums = defaultdict[tuple[str, str, str], float](float)
    for pool, priority, tenant, seconds in earlier:
        sums[pool, priority, tenant] += seconds
    for pool, priority_class, tenant, seconds in own:
        sums[pool, priority_class.value, tenant] += seconds
    if len(sums) > _MOST:
        for key in sorted(sums, key=lambda each: -sums[each])[_MOST:]:
            sums[(*key[:2], OTHERS)] += sums.pop(key)
    return tuple((*key, seconds) for key, seconds in sums.items())
