"""The order in which waiting programs become resident.

Priority classes come first, then tenants by their shares (`queueing.fairness`), which charge each turn of a
program and its sub-agents with the tokens that are not cached. Within a tenant, or among all if fairness is
off:

1. A sub-agent that is the last open one of its program, because the program waits for it alone.
2. By the setting `order`: the program that started first (`fcfs`), or the one with the least attained service
   (`least-service`).

A turn that does not fit does not block those behind it; the first few of each tenant are tried. So small
programs may pass large ones, until these reach their bound.

At ties, the request that arrived first.

Source: program-level least attained service is Autellix's order (arXiv 2502.13965).
"""

import heapq
from collections.abc import Iterator

from serve_app.core.programs.program import Program
from serve_app.core.programs.settings import ProgramOrder
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.request import PriorityClass

_MOST_TRIED = 8


_Key = tuple[int, float, int]


class ParkedTurns:
    """Turns that wait for room, by class and tenant."""

    def __init__(self, order: ProgramOrder, *, joins: bool) -> None:
        self._order = order
        self._joins = joins
        self._heaps: dict[PriorityClass, dict[str, list[tuple[_Key, int, ScheduledRequest]]]] = {}
        # The key of each turn, and the number of its only valid entry: earlier ones may have the same key.
        self._entries: dict[ScheduledRequest, tuple[_Key, int]] = {}
        self._pushed = 0
        self._of_program: dict[Program, set[ScheduledRequest]] = {}

    def add(self, scheduled: ScheduledRequest) -> None:
        """Add a turn."""
        self._of_program.setdefault(_program(scheduled), set()).add(scheduled)
        self._push(scheduled)

    def remove(self, scheduled: ScheduledRequest) -> bool:
        """Remove a turn. Return whether it was present."""
        if self._entries.pop(scheduled, None) is None:
            return False
        program = _program(scheduled)
        left = self._of_program[program]
        left.discard(scheduled)
        if not left:
            del self._of_program[program]
        return True

    def refresh(self, program: Program) -> None:
        """Sort the turns of a program again, after one of its conversations has changed."""
        for scheduled in self._of_program.get(program, ()):
            if self._key(scheduled) != self._entries[scheduled][0]:
                self._push(scheduled)

    def candidates(self, queue: RequestQueue) -> Iterator[ScheduledRequest]:
        """Yield the turns to try, in their order. Each may be removed before the next is taken."""
        for priority in PriorityClass:
            heaps = self._heaps.get(priority)
            if not heaps:
                continue
            if queue.is_fair:
                for tenant in _in_order(list(heaps), priority, queue):
                    yield from self._first(priority, tenant)
            else:
                found = [each for tenant in list(heaps) for each in self._first(priority, tenant)]
                yield from sorted(found, key=self._entries.__getitem__)

    def of_program(self, program: Program) -> int:
        """Return the number of a program's turns."""
        return len(self._of_program.get(program, ()))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(list(self._entries))

    def __repr__(self) -> str:
        return f"<ParkedTurns {len(self)} of {len(self._of_program)} programs>"

    def _first(self, priority: PriorityClass, tenant: str) -> list[ScheduledRequest]:
        """Return the first turns of a tenant."""
        heap = self._heaps[priority][tenant]
        found: list[ScheduledRequest] = []
        entries = []
        while heap and len(found) < _MOST_TRIED:
            entry = heapq.heappop(heap)
            if self._entries.get(entry[2]) == entry[:2]:
                entries.append(entry)
                found.append(entry[2])
        for entry in entries:
            heapq.heappush(heap, entry)
        if not heap:
            del self._heaps[priority][tenant]
        return found

    def _push(self, scheduled: ScheduledRequest) -> None:
        request, key = scheduled.request, self._key(scheduled)
        self._pushed += 1
        self._entries[scheduled] = key, self._pushed
        heaps = self._heaps.setdefault(request.priority, {})
        heapq.heappush(heaps.setdefault(request.tenant, []), (key, self._pushed, scheduled))

    def _key(self, scheduled: ScheduledRequest) -> _Key:
        turn, program = scheduled.turn, _program(scheduled)
        assert turn is not None
        is_last = self._joins and turn.conversation.parent is not None and program.open_agents == 1
        value = program.started_at if self._order is ProgramOrder.FCFS else program.service
        return (0 if is_last else 1, value, scheduled.sequence)


def _program(scheduled: ScheduledRequest) -> Program:
    assert scheduled.turn is not None
    return scheduled.turn.program


def _in_order(tenants: list[str], priority: PriorityClass, queue: RequestQueue) -> Iterator[str]:
    if len(tenants) == 1:
        yield from tenants
        return
    for equals in queue.shares[priority].order(tenants):
        yield from (tenant for tenant in equals if tenant in tenants)
