"""The simulator's clock: a heap of planned actions in a total order.

Two actions of one instant are carried out by rank, then in the order in which they were planned. The same
plan gives the same order, so a run can be replayed to the byte.
"""

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable


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
_Planned = tuple[float, int, int, Action]
"""Time, rank, order of planning, action."""


class Timeline:
    """Plans actions and carries them out in order.

    Attributes:
        now: the current time in seconds; it never goes back.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[_Planned] = []
        # What `at_each` has planned, the last first.
        self._known: list[_Planned] = []
        self._sequence = itertools.count()

    def at(self, time: float, rank: Rank, action: Action) -> None:
        """Plan `action` for `time`.

        Raises:
            ValueError: `time` has passed.
        """
        if time < self.now:
            raise ValueError(f"cannot plan for {time!r}: it is {self.now!r} already")
        heapq.heappush(self._heap, (time, rank, next(self._sequence), action))

    def at_each(self, rank: Rank, plans: Iterable[tuple[float, Action]]) -> None:
        """Plan many actions at once, each for its own time, as `at` would one after the other.

        They are sorted once, and kept out of the heap: it stays small, and all else is planned in it sooner.

        Raises:
            ValueError: one of the times has passed.
        """
        planned: list[_Planned] = [(time, rank, next(self._sequence), action) for time, action in plans]
        first = min((each[0] for each in planned), default=self.now)
        if first < self.now:
            raise ValueError(f"cannot plan for {first!r}: it is {self.now!r} already")
        self._known = sorted(self._known + planned, reverse=True)

    def run(self, *, until: float | None = None) -> None:
        """Carry out all planned actions, also those planned meanwhile, to the end or to `until`."""
        heap = self._heap
        while heap or self._known:
            # Read anew each time, since an action may plan more.
            known = self._known
            is_known = bool(known) and not (heap and heap[0] < known[-1])
            if until is not None and (known[-1] if is_known else heap[0])[0] > until:
                return
            self.now, _, _, action = known.pop() if is_known else heapq.heappop(heap)
            action()

    def __len__(self) -> int:
        return len(self._heap) + len(self._known)

    def __repr__(self) -> str:
        return f"<Timeline now={self.now:.6f} planned={len(self)}>"
