"""Context limits of pools: the smallest ones of each pool's connected replicas."""

from collections import Counter

from serve_app.core.routing.replica_state import ReplicaState


class ContextLimits:
    """The smallest context limits of each pool's connected replicas."""

    def __init__(self) -> None:
        # Pool, effective limit and reported limit of each counted replica.
        self._counted: dict[str, tuple[str, int, int]] = {}
        self._limits: dict[str, Counter[int]] = {}
        self._reported: dict[str, Counter[int]] = {}
        self._smallest: dict[str, tuple[int, int]] = {}
        self.changes = 0

    def of(self, pool: str) -> int | None:
        """Return the smallest limit of a pool in tokens, or None if it has no replica."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[0]

    def reported(self, pool: str) -> int | None:
        """Return the smallest reported limit. Engines certainly reject longer requests."""
        smallest = self._smallest.get(pool)
        return None if smallest is None else smallest[1]

    def update(self, state: ReplicaState) -> None:
        """Update the limits after a replica has joined, left, or changed its limit."""
        replica_id, spec = state.spec.replica_id, state.spec
        after = (spec.pool, state.context_limit, spec.max_model_len) if state.joined else None
        before = self._counted.pop(replica_id, None)
        if after is not None:
            self._counted[replica_id] = after
        if after == before:
            return
        for entry, by in ((before, -1), (after, 1)):
            if entry is not None:
                pool, limit, reported = entry
                _count(self._limits.setdefault(pool, Counter()), limit, by)
                _count(self._reported.setdefault(pool, Counter()), reported, by)
        for pool in {entry[0] for entry in (before, after) if entry is not None}:
            self._update_smallest(pool)

    def _update_smallest(self, pool: str) -> None:
        limits, before = self._limits[pool], self._smallest.pop(pool, None)
        if limits:
            self._smallest[pool] = (min(limits), min(self._reported[pool]))
        else:
            del self._limits[pool], self._reported[pool]
        self.changes += before != self._smallest.get(pool)

    def __repr__(self) -> str:
        return f"<ContextLimits {self._smallest}>"


def _count(limits: Counter[int], limit: int, by: int) -> None:
    limits[limit] += by
    if not limits[limit]:
        del limits[limit]
