"""Mean over the last seconds, computed from a cumulative sum and count such as an engine's counters."""

from collections import deque

# Long enough to smooth single steps, short enough that a TPOT gate closes before a queue builds up.
TPOT_WINDOW_S = 2.0


class RecentMean:
    """Mean over the last `window_s` seconds of a cumulative sum and count."""

    def __init__(self, window_s: float = TPOT_WINDOW_S) -> None:
        self._window_s = window_s
        # (time, sum, count), oldest first. The first is the state at the start of the window.
        self._marks: deque[tuple[float, float, int]] = deque()

    def record(self, total: float, count: int, now: float) -> None:
        """Record the sum and the count at `now`."""
        if self._marks and count < self._marks[-1][2]:
            self._marks.clear()  # the counters were reset: the server restarted
        self._marks.append((now, total, count))
        self._forget(now)

    def mean(self, now: float) -> float | None:
        """Return the mean over the window that ends at `now`, or None if nothing was counted in it."""
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
