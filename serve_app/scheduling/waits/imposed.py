"""Imposed delays: for how long each tenant's requests have kept those of other tenants waiting."""

from collections.abc import Iterator

from serve_app.request import PriorityClass, Request

# Tenants beyond these are counted together.
_MOST = 1_000
OTHERS = ""
"""The name under which all further tenants are counted."""


class ImposedDelays:
    """Seconds of delay by class and tenant of whoever took the place."""

    def __init__(self) -> None:
        self._nanoseconds: dict[tuple[PriorityClass, str], int] = {}

    def add(self, request: Request, nanoseconds: int) -> None:
        """A request took a place for which others had waited so long, summed over all of them."""
        if not nanoseconds:
            return
        key = request.priority, request.tenant
        if key not in self._nanoseconds and len(self._nanoseconds) >= _MOST:
            key = request.priority, OTHERS
        self._nanoseconds[key] = self._nanoseconds.get(key, 0) + nanoseconds

    def seconds(self) -> Iterator[tuple[PriorityClass, str, float]]:
        """Class, tenant, and the seconds of delay so far."""
        for (priority, tenant), nanoseconds in self._nanoseconds.items():
            yield priority, tenant, nanoseconds / 1e9

    def __repr__(self) -> str:
        return f"<ImposedDelays of {len(self._nanoseconds)} tenants>"
