"""The engine's own waiting queue, in order of arrival or of priority."""

import enum
import heapq
from collections.abc import Iterator

from serve_app.engine_model.sequences import EngineSequence

Key = tuple[float, ...]


class SchedulingPolicy(enum.StrEnum):
    """Order of the engine's waiting queue, named as in vLLM's `--scheduling-policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class WaitingQueue:
    """Sequences that wait in the engine.

    FCFS is the order of arrival, and a preempted sequence goes to the front. PRIORITY is the lowest value
    first, then arrival; a preempted sequence gains no precedence, as in vLLM.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy is SchedulingPolicy.PRIORITY
        # A removed sequence stays in the heap until it comes up; it never returns.
        self._heap: list[tuple[Key, EngineSequence]] = []
        self._keys: dict[EngineSequence, Key] = {}
        self._front = self._back = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def add(self, sequence: EngineSequence) -> None:
        """Queue a new sequence."""
        self._back += 1
        self._push(sequence, self._back)

    def put_back(self, sequence: EngineSequence) -> None:
        """Queue a preempted sequence."""
        self._front -= 1
        self._push(sequence, self._front)

    def head(self) -> EngineSequence:
        """The next sequence to run; the queue must not be empty."""
        while self._heap[0][1] not in self._keys:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> EngineSequence:
        """Remove and return the head."""
        sequence = self.head()
        heapq.heappop(self._heap)
        del self._keys[sequence]
        return sequence

    def remove(self, sequence: EngineSequence) -> None:
        """Remove any sequence."""
        del self._keys[sequence]

    def _push(self, sequence: EngineSequence, position: int) -> None:
        key: Key = sequence.urgency if self._by_priority else (position,)
        self._keys[sequence] = key
        heapq.heappush(self._heap, (key, sequence))
