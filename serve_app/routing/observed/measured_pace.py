"""The time per output token of an engine that does not tell it, measured from the answers it has streamed.

Question: how fast does an engine generate now? A streamed answer says so at its end, by its tokens and the
time since its first one. The median of the answers that ended lately counts, so that a client that reads
slowly, and holds its own stream up, does not speak for the engine.

It is unknown while fewer than three answers have ended in the last ten seconds: an old pace says nothing of a
batch that has changed since.
"""

from collections import deque
from statistics import median

_LATELY_S = 10.0
_ENOUGH, _REMEMBERED = 3, 32


class MeasuredPace:
    """The paces of the answers of one replica that ended lately."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        # (when it ended, time per output token), oldest first.
        self._ended: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return f"<MeasuredPace of {len(self._ended)} answers>"

    def note(self, tpot_s: float, now: float) -> None:
        """An answer has ended that had this time per output token."""
        self._ended.append((now, tpot_s))

    def tpot_s(self, now: float) -> float | None:
        """The median time per output token; None where too few answers have ended lately."""
        while self._ended and self._ended[0][0] <= now - _LATELY_S:
            self._ended.popleft()
        return median(tpot_s for _, tpot_s in self._ended) if len(self._ended) >= _ENOUGH else None
