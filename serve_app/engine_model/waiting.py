"""The engine's own waiting queue, in order of arrival or of priority."""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from serve_app.engine_model.sequences import EngineSequence


class SchedulingPolicy(enum.StrEnum):
    """Order of the engine's waiting queue, named as in vLLM's `--scheduling-policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class WaitingQueue(Protocol):
    """Sequences that wait in the engine; `put_back` returns a preempted one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[EngineSequence]: ...

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence."""

    def put_back(self, sequence: EngineSequence) -> None:
        """Queue a preempted sequence."""

    def head(self) -> EngineSequence:
        """The next sequence to run; the queue must not be empty."""

    def pop(self) -> EngineSequence:
        """Remove and return the head."""

    def remove(self, sequence: EngineSequence) -> None:
        """Remove any sequence."""


class ArrivalOrder:
    """First come first served; a preempted sequence goes to the front."""

    def __init__(self) -> None:
        self._queue: OrderedDict[EngineSequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(self._queue)

    def add(self, sequence: EngineSequence) -> None:
        """Put a new sequence at the end."""
        self._queue[sequence] = None

    def put_back(self, sequence: EngineSequence) -> None:
        """Put a preempted sequence at the front."""
        self._queue[sequence] = None
        self._queue.move_to_end(sequence, last=False)

    def head(self) -> EngineSequence:
        """The next sequence to run; the queue must not be empty."""
        return next(iter(self._queue))

    def pop(self) -> EngineSequence:
        """Remove and return the head."""
        return self._queue.popitem(last=False)[0]

    def remove(self, sequence: EngineSequence) -> None:
        """Remove any sequence."""
        del self._queue[sequence]


class UrgencyOrder:
    """Lowest priority value first, then arrival; as in vLLM, a preempted sequence gains no precedence."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], EngineSequence]] = []
        # A removed sequence stays in the heap until it comes up.
        self._present: set[EngineSequence] = set()

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(sorted(self._present, key=lambda sequence: sequence.urgency))

    def add(self, sequence: EngineSequence) -> None:
        """Insert a sequence by its priority and arrival."""
        self._present.add(sequence)
        heapq.heappush(self._heap, (sequence.urgency, sequence))

    put_back = add

    def head(self) -> EngineSequence:
        """The next sequence to run; the queue must not be empty."""
        while self._heap[0][1] not in self._present:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> EngineSequence:
        """Remove and return the head."""
        sequence = self.head()
        heapq.heappop(self._heap)
        self._present.remove(sequence)
        return sequence

    def remove(self, sequence: EngineSequence) -> None:
        """Remove any sequence."""
        self._present.remove(sequence)


def waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """An empty queue for the policy."""
    return UrgencyOrder() if policy is SchedulingPolicy.PRIORITY else ArrivalOrder()
