"""Whether an engine that has requests still computes.

A process that hangs, or that was stopped, is alive: it answers no request and fails no check. Its front end
is a process of its own, and goes on stating the load of the last step.
"""

from collections.abc import Hashable

# Time that nobody looked at the engine counts as no more than this: its observer was busy or stopped itself.
_LONGEST_GAP_S = 5.0


class HangWatch:
    """Adds up for how long an engine has had requests without a sign of progress."""

    def __init__(self) -> None:
        self._progress: Hashable = None
        self._looked_at = float("-inf")
        self._stalled_s = 0.0

    def __repr__(self) -> str:
        return f"<HangWatch stalled_s={self._stalled_s:.1f}>"

    def note(self, progress: Hashable, *, busy: bool, now: float) -> float:
        """Look at the engine, a few times a second, and return for how many seconds it has stalled.

        Args:
            progress: anything that changes with each step of the engine.
            busy: whether it has requests.
        """
        if busy and progress == self._progress:
            self._stalled_s += min(now - self._looked_at, _LONGEST_GAP_S)
        else:
            self._progress, self._stalled_s = progress, 0.0
        self._looked_at = now
        return self._stalled_s
