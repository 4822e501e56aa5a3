"""The simulator's clock: a heap of planned actions in a total order.

Two actions of one instant are carried out by rank, then in the order in which they were planned. The same
plan gives the same order, so a run can be replayed to the byte.
"""

import enum
import heapq
import itertools
from collections.abc import Callable


class Rank(enum.IntEnum):
    """The order of actions in one instant.

    Engines move first, so that all others see their new state. Feedback from engines reaches the scheduler
    before arrivals do, so capacity that becomes free at the instant of an arrival is available to it. The
    scheduler's own wake-ups come last.
    """

    ENGINE = 0
    FEEDBACK = 1
    REPORT = 2
    ARRIVAL = 3
    WAKE_UP = 4


Action = Callable[[], None]


class Timeline:
    """Plans actions and carries them out in order.

    Attributes:
        now: the current time in seconds; it never goes back.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Action]] = []
        self._sequence = itertools.count()

    def at(self, time: float, rank: Rank, action: Action) -> None:
        """Plan `action` for `time`.

        Raises:
            ValueError: `time` has passed.
        """
        if time < self.now:
            raise ValueError(f"cannot plan for {time!r}: it is {self.now!r} already")
        heapq.heappush(self._heap, (time, rank, next(self._sequence), action))

    def run(self, *, until: float | None = None) -> None:
        """Carry out all planned actions, also those planned meanwhile, to the end or to `until`."""
        heap = self._heap
        while heap and (until is None or heap[0][0] <= until):
            self.now, _, _, action = heapq.heappop(heap)
            action()

    def __len__(self) -> int:
        return len(self._heap)

    def __repr__(self) -> str:
        return f"<Timeline now={self.now:.6f} planned={len(self._heap)}>"
