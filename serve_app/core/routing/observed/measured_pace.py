"""The time per output token of an engine that does not report it, measured from its streamed answers.

A streamed answer gives the pace at its end, from its tokens and the time since its first one. The median of
recent answers is used, so that a client that reads slowly, and delays its own stream, does not distort it.

The pace is unknown with fewer than three answers in the last ten seconds, because the batch may have
changed since.
"""

from collections import deque
from statistics import median

_RECENT_S = 10.0
_MIN_PACES, _MAX_PACES = 3, 32


class MeasuredPace:
    """The paces of recent answers of one replica."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        # (end time, time per output token), oldest first.
        self._ended: deque[tuple[float, float]] = deque(maxlen=_MAX_PACES)

    def __repr__(self) -> str:
        return f"<MeasuredPace of {len(self._ended)} answers>"

    def record(self, tpot_s: float, now: float) -> None:
        """Add the time per output token of a completed answer."""
        self._ended.append((now, tpot_s))

    def tpot_s(self, now: float) -> float | None:
        """Return the median time per output token, or None with too few recent answers."""
        while self._ended and self._ended[0][0] <= now - _RECENT_S:
            self._ended.popleft()
        return median(tpot_s for _, tpot_s in self._ended) if len(self._ended) >= _MIN_PACES else None
