"""The smallest context limit of each pool's connected replicas, kept while replicas come, go and learn."""

from collections import Counter

from serve_app.routing.replica_state import ReplicaState


class ContextLimits:
    """Counts the limits of each pool, of which there are few different ones.

    Attributes:
        changes: how often the smallest limit of some pool has changed.
    """

    def __init__(self) -> None:
        # Pool, limit and stated limit of each replica that is counted.
        self._counted: dict[str, tuple[str, int, int]] = {}
        self._limits: dict[str, Counter[int]] = {}
        self._told: dict[str, Counter[int]] = {}
        self._smallest: dict[str, tuple[int, int]] = {}
        self.changes = 0

    def of(self, pool: str) -> int | None:
        """The smallest limit of a pool, in tokens; None while it has no replica."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[0]

    def told(self, pool: str) -> int | None:
        """The same without what was only learned: a longer request is refused for certain."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[1]

    def update(self, state: ReplicaState) -> None:
        """A replica has joined or is gone, or its limit is another one."""
        name, spec = state.spec.replica_id, state.spec
        now = (spec.pool, state.context_limit, spec.max_model_len) if state.joined else None
        before = self._counted.pop(name, None)
        if now is not None:
            self._counted[name] = now
        if now == before:
            return
        for entry, by in ((before, -1), (now, 1)):
            if entry is not None:
                pool, limit, told = entry
                _count(self._limits.setdefault(pool, Counter()), limit, by)
                _count(self._told.setdefault(pool, Counter()), told, by)
        for pool in {entry[0] for entry in (before, now) if entry is not None}:
            self._measure(pool)

    def _measure(self, pool: str) -> None:
        limits, before = self._limits[pool], self._smallest.pop(pool, None)
        if limits:
            self._smallest[pool] = (min(limits), min(self._told[pool]))
        else:
            del self._limits[pool], self._told[pool]
        self.changes += before != self._smallest.get(pool)

    def __repr__(self) -> str:
        return f"<ContextLimits {self._smallest}>"


def _count(limits: Counter[int], limit: int, by: int) -> None:
    limits[limit] += by
    if not limits[limit]:
        del limits[limit]
