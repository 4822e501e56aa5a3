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

import bisect
import math
from collections.abc import Collection, Iterator

from serve_app.core.programs.program import Program
from serve_app.core.programs.settings import ProgramOrder
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.request import PriorityClass

_MOST_TRIED = 8


_Key = tuple[int, float, int]
_Entry = tuple[_Key, ScheduledRequest]


class ParkedTurns:
    """Turns that wait for room, by class and tenant."""

    def __init__(self, order: ProgramOrder, *, joins: bool) -> None:
        self._order = order
        self._joins = joins
        # The turns of each tenant in their order; only tenants with turns.
        self._sorted: dict[PriorityClass, dict[str, list[_Entry]]] = {}
        self._keys: dict[ScheduledRequest, _Key] = {}
        # The tokens that the turns need, the fewest first.
        self._tokens: list[int] = []
        self._of_program: dict[Program, set[ScheduledRequest]] = {}

    def add(self, scheduled: ScheduledRequest) -> None:
        """Add a turn."""
        self._of_program.setdefault(_program(scheduled), set()).add(scheduled)
        bisect.insort(self._tokens, scheduled.estimate.expected_tokens)
        self._insert(scheduled)

    def remove(self, scheduled: ScheduledRequest) -> bool:
        """Remove a turn. Return whether it was present."""
        if scheduled not in self._keys:
            return False
        self._take_out(scheduled)
        del self._tokens[bisect.bisect_left(self._tokens, scheduled.estimate.expected_tokens)]
        program = _program(scheduled)
        left = self._of_program[program]
        left.discard(scheduled)
        if not left:
            del self._of_program[program]
        return True

    def refresh(self, program: Program) -> None:
        """Sort the turns of a program again, after one of its conversations has changed."""
        for scheduled in self._of_program.get(program, ()):
            if self._key(scheduled) != self._keys[scheduled]:
                self._take_out(scheduled)
                self._insert(scheduled)

    def candidates(self, queue: RequestQueue) -> Iterator[ScheduledRequest]:
        """Yield the turns to try, in their order. Each may be removed before the next is taken."""
        for priority in PriorityClass:
            tenants = self._sorted.get(priority)
            if not tenants:
                continue
            if queue.is_fair:
                for tenant in _in_order(tenants, priority, queue):
                    yield from [scheduled for _, scheduled in tenants[tenant][:_MOST_TRIED]]
            else:
                found = [entry for entries in tenants.values() for entry in entries[:_MOST_TRIED]]
                yield from [scheduled for _, scheduled in sorted(found)]

    @property
    def fewest_tokens(self) -> float:
        """The fewest tokens that any turn needs; infinity without a turn."""
        return self._tokens[0] if self._tokens else math.inf

    def of_program(self, program: Program) -> int:
        """Return the number of a program's turns."""
        return len(self._of_program.get(program, ()))

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(list(self._keys))

    def __repr__(self) -> str:
        return f"<ParkedTurns {len(self)} of {len(self._of_program)} programs>"

    def _insert(self, scheduled: ScheduledRequest) -> None:
        request, key = scheduled.request, self._key(scheduled)
        self._keys[scheduled] = key
        tenants = self._sorted.setdefault(request.priority, {})
        # Keys are unique, so that turns are never compared.
        bisect.insort(tenants.setdefault(request.tenant, []), (key, scheduled))

    def _take_out(self, scheduled: ScheduledRequest) -> None:
        request = scheduled.request
        tenants = self._sorted[request.priority]
        entries = tenants[request.tenant]
        del entries[bisect.bisect_left(entries, (self._keys.pop(scheduled),))]
        if not entries:
            del tenants[request.tenant]

    def _key(self, scheduled: ScheduledRequest) -> _Key:
        turn, program = scheduled.turn, _program(scheduled)
        assert turn is not None
        is_last = self._joins and turn.conversation.parent is not None and program.open_agents == 1
        value = program.started_at if self._order is ProgramOrder.FCFS else program.service
        return (0 if is_last else 1, value, scheduled.sequence)


def _program(scheduled: ScheduledRequest) -> Program:
    assert scheduled.turn is not None
    return scheduled.turn.program


def _in_order(tenants: Collection[str], priority: PriorityClass, queue: RequestQueue) -> Iterator[str]:
    if len(tenants) == 1:
        yield from list(tenants)
        return
    for equals in queue.shares[priority].order(tenants):
        yield from (tenant for tenant in equals if tenant in tenants)
