"""Where requests wait: by priority class and tenant, and there in lanes, each in its policy's order.

A lane is a length queue, but for one set of pools and one grade of prefill. Why lanes by set of pools: two
requests of one queue may differ in where they can go. With a lane for each
combination, the head of a lane speaks for all behind it, and asking "who may go to this pool?" never
scans the queue. There are at most four combinations (short, long, either with spill).

A lane is a heap with lazy deletion: a request that leaves from the middle (cancelled, expired) is marked and
dropped when it comes to the top, and the heap is rebuilt when most of it is marked.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from serve_app.request import PriorityClass, Request, Usage
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.queueing.fairness import FairnessMode, FairnessSettings, FairShares
from serve_app.scheduling.request import Entry

# Came back from a replica, when it was told to, or neither; the policy's key, order of arrival, and a number
# that no other stay in a lane has.
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


class _Desk:
    """What one tenant has waiting in one class."""

    __slots__ = ("lanes", "tokens", "waiting")

    def __init__(self) -> None:
        self.lanes: dict[_LaneName, _Lane] = {}
        self.waiting = 0
        self.tokens = 0

    def lane(self, name: _LaneName) -> _Lane:
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = _Lane(name)
        return lane


class WaitingRoom:
    """All waiting requests of a model.

    Attributes:
        shares: the books of each class's tenants, kept also where they decide nothing.
        waiting_tokens: expected tokens of all who wait.
        waiting_at: requests above the batch class that wait, by home pool.
    """

    def __init__(self, policy: OrderingPolicy, fairness: FairnessSettings) -> None:
        self._policy = policy
        self._fairness = fairness
        self._desks: dict[PriorityClass, dict[str, _Desk]] = {priority: {} for priority in PriorityClass}
        self._lane_of: dict[str, _Lane] = {}
        self._queues: dict[str, int] = {}
        self._returned = 0
        self._stays = 0
        self._is_fair = fairness.mode is not FairnessMode.OFF
        self.shares = {priority: FairShares(fairness) for priority in PriorityClass}
        self.waiting_tokens = 0
        self.waiting_at: Counter[str] = Counter()

    def add(self, entry: Entry) -> None:
        """Queue a request; one that came back from a replica goes to the front."""
        entry.length_queue = self._policy.queue_of(entry)
        request = entry.request
        desks = self._desks[request.priority]
        desk = desks.get(request.tenant)
        if desk is None:
            desk = desks[request.tenant] = _Desk()
            self.shares[request.priority].came(request.tenant)
        self._file(entry, desk)
        entry.queued = True
        self._count(entry, desk, 1)

    def remove(self, entry: Entry) -> None:
        """Take a request out, wherever it stands."""
        request = entry.request
        lane = self._lane_of.pop(request.request_id)
        lane.remove(entry)
        desks = self._desks[request.priority]
        desk = desks[request.tenant]
        if not lane:
            del desk.lanes[lane.name]
        entry.queued = False
        self._count(entry, desk, -1)
        if not desk.waiting:
            del desks[request.tenant]
            self.shares[request.priority].went(request.tenant)

    @property
    def keeps_promises(self) -> bool:
        """Whether whoever comes back when it was told to goes before others.

        In the order of arrival it need not: nobody who comes later passes it.
        """
        return self._policy.promotes

    def heads(self, priority: PriorityClass, pool: str, now: float, *, at_home: bool) -> Iterator[Entry]:
        """Heads of the lanes of one class that may go to `pool`, in the order of tenants' turns and scores.

        Args:
            at_home: those whose home is `pool`; otherwise those that would spill into it.
        """
        desks = self._desks[priority]
        if not self._is_fair or len(desks) == 1:
            yield from self._ranked(desks.values(), pool, now, at_home=at_home)
            return
        for equals in list(self.shares[priority].turns()):
            yield from self._ranked([desks[name] for name in equals], pool, now, at_home=at_home)

    def returned_heads(self, pool: str, *, at_home: bool) -> list[Entry]:
        """Those who came back from a replica, most urgent class first, then the earliest."""
        if not self._returned:
            return []
        heads = [head for head in self._all_heads(pool, at_home=at_home) if head.returned]
        heads.sort(key=lambda head: (head.request.priority.rank, head.request.arrived_at, head.sequence))
        return heads

    def all_heads(self, pool: str, *, at_home: bool) -> list[Entry]:
        """Heads of every lane that may go to `pool`, in no order."""
        return list(self._all_heads(pool, at_home=at_home))

    def behind_requests(self, request: Request) -> float:
        """How far the request's tenant is behind its share, in average requests; 0 without fairness."""
        if not self._is_fair:
            return 0.0
        return self.shares[request.priority].behind_requests(request.tenant)

    def work_ahead(self, request: Request) -> int:
        """Expected tokens that will be served before a request that comes now.

        All of the classes above, all that its tenant has waiting already, and from every other tenant of its
        class as much as that tenant gets beside it; without fairness all of its class.
        """
        above = sum(
            desk.tokens
            for priority, desks in self._desks.items()
            if priority.rank < request.priority.rank
            for desk in desks.values()
        )
        desks = self._desks[request.priority]
        if not self._is_fair:
            return above + sum(desk.tokens for desk in desks.values())
        own = desks[request.tenant].tokens if request.tenant in desks else 0
        weight = self._fairness.weight(request.tenant)
        others = sum(
            min(desk.tokens, own * self._fairness.weight(name) / weight + desk.tokens / desk.waiting)
            for name, desk in desks.items()
            if name != request.tenant
        )
        return above + own + round(others)

    def waiting_classes(self) -> list[PriorityClass]:
        """The classes in which anybody waits, the highest first."""
        return [priority for priority, desks in self._desks.items() if desks]

    def waiting_of(self, priority: PriorityClass, tenant: str | None = None) -> int:
        """Requests that wait of a class, or of one of its tenants."""
        desks = self._desks[priority]
        if tenant is None:
            return sum(desk.waiting for desk in desks.values())
        return desks[tenant].waiting if tenant in desks else 0

    def reroute(self, entry: Entry, pools: tuple[str, ...]) -> None:
        """Let a waiting request go to other pools."""
        lane = self._lane_of[entry.request.request_id]
        lane.remove(entry)
        desk = self._desks[entry.request.priority][entry.request.tenant]
        if not lane:
            del desk.lanes[lane.name]
        self._count_at_home(entry, -1)
        entry.pools = pools
        self._count_at_home(entry, 1)
        self._file(entry, desk)

    def charge(self, entry: Entry) -> None:
        """Its tenant is being served: charge what the request is expected to cost."""
        entry.charged = self._fairness.expected_cost(entry.estimate, entry.cached_tokens)
        self._shares_of(entry).charge(entry.request.tenant, entry.charged)

    def settle(self, entry: Entry, usage: Usage) -> None:
        """The engine has told what it really was."""
        self._correct(entry, self._fairness.real_cost(usage))

    def refund(self, entry: Entry) -> None:
        """It came back unserved."""
        self._correct(entry, 0.0)

    def queue_anew(self) -> None:
        """Ask the policy again for everybody's queue; arrival and place among equals are kept."""
        entries = sorted(self, key=lambda entry: entry.sequence)
        # Tenants stay where they are all the while: who leaves and comes back is lifted.
        for desks in self._desks.values():
            for desk in desks.values():
                desk.lanes.clear()
        self._queues.clear()
        for entry in entries:
            entry.length_queue = self._policy.queue_of(entry)
            self._queues[entry.length_queue] = self._queues.get(entry.length_queue, 0) + 1
            self._file(entry, self._desks[entry.request.priority][entry.request.tenant])

    def queue_names(self) -> set[str]:
        """The length queues in which anybody waits."""
        return set(self._queues)

    def counts(self) -> dict[tuple[str, str], int]:
        """Number waiting by (home pool, length queue)."""
        counts: dict[tuple[str, str], int] = {}
        for lane in self._lanes():
            name = (lane.pools[0], lane.queue)
            counts[name] = counts.get(name, 0) + len(lane)
        return counts

    def lanes(self) -> Iterator[tuple[Entry, int]]:
        """Every lane's head, and how many wait in the lane."""
        for lane in self._lanes():
            head = lane.head()
            if head is not None:
                yield head, len(lane)

    def _correct(self, entry: Entry, cost: float) -> None:
        self._shares_of(entry).correct(entry.request.tenant, cost - entry.charged)
        entry.charged = cost

    def _shares_of(self, entry: Entry) -> FairShares:
        return self.shares[entry.request.priority]

    def _file(self, entry: Entry, desk: _Desk) -> None:
        lane = desk.lane((entry.length_queue, entry.pools, entry.grade))
        self._stays += 1
        # Whoever was refused before and came back when it was told to came first.
        place = 0 if entry.returned else 1 if entry.claimed else 2
        lane.add((place, self._policy.key(entry), entry.sequence, self._stays), entry)
        self._lane_of[entry.request.request_id] = lane

    def _ranked(self, desks: Iterable[_Desk], pool: str, now: float, *, at_home: bool) -> list[Entry]:
        heads = [
            head
            for desk in desks
            for lane in desk.lanes.values()
            if pool in lane.pools and (lane.pools[0] == pool) is at_home and (head := lane.head()) is not None
        ]
        if len(heads) > 1:
            self._policy.rank(heads, now)
        return heads

    def _all_heads(self, pool: str, *, at_home: bool) -> Iterator[Entry]:
        for lane in self._lanes():
            if pool in lane.pools and (lane.pools[0] == pool) is at_home:
                head = lane.head()
                if head is not None:
                    yield head

    def _lanes(self) -> Iterator[_Lane]:
        for desks in self._desks.values():
            for desk in desks.values():
                yield from desk.lanes.values()

    def _count_at_home(self, entry: Entry, by: int) -> None:
        if entry.request.priority is not PriorityClass.BATCH:
            self.waiting_at[entry.pools[0]] += by

    def _count(self, entry: Entry, desk: _Desk, by: int) -> None:
        self._count_at_home(entry, by)
        tokens = by * entry.estimate.expected_tokens
        desk.waiting += by
        desk.tokens += tokens
        self.waiting_tokens += tokens
        self._returned += by * entry.returned
        count = self._queues.get(entry.length_queue, 0) + by
        if count:
            self._queues[entry.length_queue] = count
        else:
            del self._queues[entry.length_queue]

    def __iter__(self) -> Iterator[Entry]:
        for lane in self._lanes():
            for item in lane._heap:  # noqa: SLF001 - a lane is this file's own
                if lane._is_live(item):  # noqa: SLF001
                    yield item[1]

    def __len__(self) -> int:
        return len(self._lane_of)

    def __repr__(self) -> str:
        tenants = len({name for desks in self._desks.values() for name in desks})
        return f"<WaitingRoom {len(self)} of {tenants} tenants, {self.waiting_tokens} tokens>"
