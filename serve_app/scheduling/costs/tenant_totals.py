"""Sums by class and tenant, bounded in number."""

from collections.abc import Iterator

from serve_app.request import PriorityClass, Request

# Tenants beyond these are summed together.
_MOST = 1_000
OTHERS = "other"
"""The name under which all further tenants are summed."""


class TenantTotals:
    """Seconds by a place, class and tenant.

    Args:
        most: how many sums there may be besides those of `OTHERS`.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._seconds: dict[tuple[str, PriorityClass, str], float] = {}

    def add(self, place: str, request: Request, seconds: float) -> None:
        """A request has so much more on its account; nothing is kept of no time at all."""
        if not seconds:
            return
        key = place, request.priority, request.tenant
        known = self._seconds
        if key not in known and len(known) >= self._most:
            key = place, request.priority, OTHERS
        known[key] = known.get(key, 0.0) + seconds

    def __iter__(self) -> Iterator[tuple[str, PriorityClass, str, float]]:
        """Place, class, tenant and the seconds so far."""
        for (place, priority, tenant), seconds in self._seconds.items():
            yield place, priority, tenant, seconds

    def __repr__(self) -> str:
        return f"<TenantTotals {len(self._seconds)} sums, {sum(self._seconds.values()):.1f} s>"
