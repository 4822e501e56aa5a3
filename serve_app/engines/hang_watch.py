"""Hang detection for engines that have requests but compute nothing.

A hung or stopped process (SIGSTOP) is still alive, so it fails no liveness check. Its frontend is a separate
process and continues to report the load of the last step.
"""

from collections.abc import Hashable

# Limit on the time that one check adds: after a longer gap, the observer itself was busy or suspended.
_MAX_GAP_S = 5.0


class HangWatch:
    """Stopwatch for the time that an engine has had requests without making progress."""

    def __init__(self) -> None:
        self._progress: Hashable = None
        self._checked_at = float("-inf")
        self._hanging_s = 0.0

    def __repr__(self) -> str:
        return f"<HangWatch hanging_s={self._hanging_s:.1f}>"

    def update(self, progress: Hashable, *, busy: bool, now: float) -> float:
        """Record the state of the engine and return for how many seconds it has been hanging.

        Call this a few times per second.

        Args:
            progress: a value that changes with each step of the engine.
        """
        if busy and progress == self._progress:
            self._hanging_s += min(now - self._checked_at, _MAX_GAP_S)
        else:
            self._progress, self._hanging_s = progress, 0.0
        self._checked_at = now
        return self._hanging_s
