"""A mean over the last seconds, from a running sum and a running count, as counters of engines give them."""

from collections import deque

# Long enough to smooth single steps, short enough that a gate on TPOT closes before a queue builds up.
TPOT_WINDOW_S = 2.0


class RecentMean:
    """Mean over the last `window_s` seconds, from a running sum and count."""

    def __init__(self, window_s: float = TPOT_WINDOW_S) -> None:
        self._window_s = window_s
        # (time, sum, count), oldest first; the first is the state when the window began.
        self._marks: deque[tuple[float, float, int]] = deque()

    def note(self, total: float, count: int, now: float) -> None:
        """Store the sum and the count as they are at `now`."""
        if self._marks and count < self._marks[-1][2]:
            self._marks.clear()  # the counters were reset: the server restarted
        self._marks.append((now, total, count))
        self._forget(now)

    def mean(self, now: float) -> float | None:
        """Mean over the window that ends at `now`; None when nothing was counted in it."""
        self._forget(now)
        if not self._marks:
            return None
        _, first_total, first_count = self._marks[0]
        _, last_total, last_count = self._marks[-1]
        counted = last_count - first_count
        return (last_total - first_total) / counted if counted > 0 else None

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._window_s:
            self._marks.popleft()
