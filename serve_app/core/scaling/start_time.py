"""The start time of engines, learned from orders and arrivals of replicas."""

from collections import deque
from collections.abc import Iterable

# Weight of one start in the mean.
_WEIGHT = 0.3
# The prior: a small model on an existing node.
_PRIOR_S = 60.0
# Replicas remembered after they have left; many more than a pool has at a time.
_KNOWN = 10_000


class StartTime:
    """The mean time from an order to a replica that accepts requests.

    A replica counts once. One that reconnects, also to another scheduler, has not started.
    """

    def __init__(self) -> None:
        self.seconds = _PRIOR_S
        self._ordered: deque[float] = deque()
        # In the order of their last observation; None before the first one.
        self._known: dict[str, None] | None = None
        self._is_learned = False

    def on_order(self, more: int, now: float) -> None:
        """Record orders of additional replicas. A negative number cancels the last orders."""
        for _ in range(more):
            self._ordered.append(now)
        for _ in range(min(-more, len(self._ordered))):
            self._ordered.pop()

    def on_ready(self, replica_ids: Iterable[str], now: float) -> None:
        """Learn from the replicas that accept requests now."""
        ready = tuple(replica_ids)
        joined = 0 if self._known is None else sum(each not in self._known for each in ready)
        self._record_ready(ready)
        for _ in range(min(joined, len(self._ordered))):
            self._learn(now - self._ordered.popleft())

    def learned_s(self) -> float | None:
        """Return the mean to be persisted, or None if nothing has been learned."""
        return self.seconds if self._is_learned else None

    def restore(self, seconds: float) -> None:
        """Continue from a persisted mean."""
        self.seconds, self._is_learned = seconds, True

    def _learn(self, took_s: float) -> None:
        self.seconds = took_s if not self._is_learned else self.seconds + _WEIGHT * (took_s - self.seconds)
        self._is_learned = True

    def _record_ready(self, ready: tuple[str, ...]) -> None:
        known = self._known = {} if self._known is None else self._known
        for each in ready:
            known.pop(each, None)
            known[each] = None
        while len(known) > _KNOWN:
            del known[next(iter(known))]

    def __repr__(self) -> str:
        return f"<StartTime {self.seconds:.1f} s, {len(self._ordered)} ordered>"
