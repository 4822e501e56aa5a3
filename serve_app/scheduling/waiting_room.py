"""Where requests wait: lanes by length queue, pools and length of prefill, each in its policy's order.

Why lanes by set of pools: two requests of one queue may differ in where they can go. With a lane for each
combination, the head of a lane speaks for all behind it, and asking "who may go to this pool?" never
scans the queue. There are at most four combinations (short, long, either with spill).

A lane is a heap with lazy deletion: a request that leaves from the middle (cancelled, expired) is marked and
dropped when it comes to the top, and the heap is rebuilt when most of it is marked.
"""

import heapq
from collections.abc import Iterator

from serve_app.scheduling.entry import Entry
from serve_app.scheduling.policies.protocol import OrderingPolicy

# Came back or not, the policy's key, order of arrival, and a number that no other stay in a lane has.
_Key = tuple[int, float, int, int]
_LaneName = tuple[str, tuple[str, ...], int]


class _Lane:
    """Requests that share a length queue and the pools they may go to."""

    __slots__ = ("_heap", "_live", "name", "pools", "queue")

    def __init__(self, name: _LaneName) -> None:
        self.name = name
        self.queue, self.pools, _ = name
        self._heap: list[tuple[_Key, Entry]] = []
        self._live: dict[str, _Key] = {}

    def add(self, key: _Key, entry: Entry) -> None:
        self._live[entry.request.request_id] = key
        heapq.heappush(self._heap, (key, entry))

    def remove(self, entry: Entry) -> None:
        del self._live[entry.request.request_id]
        if len(self._heap) > 32 and len(self._heap) > 2 * len(self._live):
            self._heap = [item for item in self._heap if self._is_live(item)]
            heapq.heapify(self._heap)

    def head(self) -> Entry | None:
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0][1]
            heapq.heappop(self._heap)
        return None

    def _is_live(self, item: tuple[_Key, Entry]) -> bool:
        # By key, not by request: one that left and came back stands in the heap twice.
        return self._live.get(item[1].request.request_id) == item[0]

    def __len__(self) -> int:
        return len(self._live)


class WaitingRoom:
    """All waiting requests of a model."""

    def __init__(self, policy: OrderingPolicy) -> None:
        self._policy = policy
        self._lanes: dict[_LaneName, _Lane] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._stays = 0
        self.waiting_tokens = 0

    def add(self, entry: Entry) -> None:
        """Queue a request; one that came back from a replica goes to the front."""
        entry.length_queue = self._policy.queue_of(entry)
        name = (entry.length_queue, entry.pools, entry.grade)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name)
        self._stays += 1
        lane.add((0 if entry.returned else 1, self._policy.key(entry), entry.sequence, self._stays), entry)
        self._lane_of[entry.request.request_id] = lane
        entry.queued = True
        self.waiting_tokens += entry.estimate.expected_tokens

    def remove(self, entry: Entry) -> None:
        """Take a request out, wherever it stands."""
        lane = self._lane_of.pop(entry.request.request_id)
        lane.remove(entry)
        if not lane:
            del self._lanes[lane.name]
        entry.queued = False
        self.waiting_tokens -= entry.estimate.expected_tokens

    def heads(self, pool: str, now: float, *, at_home: bool) -> list[Entry]:
        """The first of each lane that may go to `pool`, most urgent first.

        Args:
            at_home: those whose home is `pool`; otherwise those that would spill into it.
        """
        heads = [
            head
            for lane in self._lanes.values()
            if pool in lane.pools and (lane.pools[0] == pool) is at_home and (head := lane.head()) is not None
        ]
        if len(heads) > 1:
            self._policy.rank(heads, now)
            heads.sort(key=lambda head: not head.returned)
        return heads

    def queue_anew(self) -> None:
        """Ask the policy again for everybody's queue; arrival and place among equals are kept."""
        entries = sorted(self, key=lambda entry: entry.sequence)
        for entry in entries:
            self.remove(entry)
        for entry in entries:
            self.add(entry)

    def queue_names(self) -> set[str]:
        """The length queues in which anybody waits."""
        return {lane.queue for lane in self._lanes.values()}

    def counts(self) -> dict[tuple[str, str], int]:
        """Number waiting by (home pool, length queue)."""
        counts: dict[tuple[str, str], int] = {}
        for lane in self._lanes.values():
            name = (lane.pools[0], lane.queue)
            counts[name] = counts.get(name, 0) + len(lane)
        return counts

    def __iter__(self) -> Iterator[Entry]:
        for lane in self._lanes.values():
            for item in lane._heap:  # noqa: SLF001 - a lane is this file's own
                if lane._is_live(item):  # noqa: SLF001
                    yield item[1]

    def __len__(self) -> int:
        return len(self._lane_of)

    def __repr__(self) -> str:
        return f"<WaitingRoom {len(self)} in {len(self._lanes)} lanes, {self.waiting_tokens} tokens>"
