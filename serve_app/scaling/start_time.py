"""How long an engine takes to start, learned from orders and arrivals of replicas."""

from collections import deque

# Weight of one start in the mean.
_WEIGHT = 0.3
# Before the first: a small model on a node that is there.
_PRIOR_S = 60.0


class StartTime:
    """The mean time from an order to a replica that takes requests.

    Attributes:
        seconds: that mean.
    """

    def __init__(self) -> None:
        self.seconds = _PRIOR_S
        self._ordered: deque[float] = deque()
        self._ready: int | None = None
        self._seen = False

    def on_order(self, more: int, now: float) -> None:
        """So many replicas more are ordered; a negative number takes back the last orders."""
        for _ in range(more):
            self._ordered.append(now)
        for _ in range(min(-more, len(self._ordered))):
            self._ordered.pop()

    def on_ready(self, ready: int, now: float) -> None:
        """So many replicas take requests now."""
        came = 0 if self._ready is None else ready - self._ready
        self._ready = ready
        for _ in range(min(came, len(self._ordered))):
            took_s = now - self._ordered.popleft()
            self.seconds = took_s if not self._seen else self.seconds + _WEIGHT * (took_s - self.seconds)
            self._seen = True

    def __repr__(self) -> str:
        return f"<StartTime {self.seconds:.1f} s, {len(self._ordered)} ordered>"
