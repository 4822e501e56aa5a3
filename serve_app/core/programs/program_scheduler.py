"""Scheduling of programs: retains contexts in the KV caches, and delays turns that would evict them.

- `ProgramScheduler`: applies the rules below to the events of a scheduler.
- `ParkedTurns`: the order in which waiting programs become resident.
- `programs_document`: a snapshot of the programs, for operators.

Engines compute a prompt from its first block that they do not have cached. If the contexts of all programs
do not fit into the caches, each turn evicts the context that the next one needs, and nearly every token is
computed again. So a program runs its turns while its context stays on one replica, and others wait between
two turns, when they hold nothing.

Rules, in order:

1. A turn whose context is on a replica is bound to it: it waits there, as long as waiting costs less than
   computing the context again. After that it may go anywhere. If it moves, its context does.
2. Another turn is *parked* until a replica has room for its context (`residency`). Turns that need less than
   1/64 of every cache are not parked, nor are those whose prompt is computed within a second: waiting would
   cost more than it saves.
3. Whenever room may have become free, the parked turns are tried in their order (`order`).
4. A replica that runs and retains nothing accepts any turn.
5. A turn that has been parked for the starvation bound of its class is admitted without room, as long as the
   prompts of such turns are at most `_FORCED_SHARE` of the service of all requests. So a turn is parked for
   at most its bound, plus the time in which the replicas serve `1 / _FORCED_SHARE` times the prompts of those
   that reached their bound before it.

Requests without a program are neither parked nor bound. What they hold counts in `room`.

`ParkedTurns`. Priority classes come first, then tenants by their shares (`queueing.fairness`), which charge
each turn of a program and its sub-agents with the tokens that are not cached. Within a tenant, or among all
if fairness is off:

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
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.core.dispatch.promotion import PromotionSettings
from serve_app.core.programs.program import Conversation, Program, ProgramTable, ProgramTurn
from serve_app.core.programs.residency import Gaps, ReplicaContexts, Residency
from serve_app.core.queueing.expiry import ExpiryHeap, earliest
from serve_app.core.queueing.fairness import token_service
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.prefix import PrefixAffinity
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings import ProgramOrder, ProgramsSettings
from serve_app.request import PriorityClass, TurnEnd

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


# Contexts below this share of a cache are never parked: even dozens of them cost little.
_SMALL_SHARE = 1 / 64
# Nor are contexts that are computed in less time than half of the gaps after calls of tools take.
_CHEAP_S = 1.0
# Prompt tokens of forced admissions over the service of all requests, and how many may be saved up.
_FORCED_SHARE = 0.1
_MOST_SAVED = 200_000
# Shorter contexts show little about the capacity: most of them may be a common system prompt.
_CLEAR_TOKENS = 1_000
# Replicas with a part of the prompt that are compared by their room.
_MOST_MATCHES = 8


class ProgramScheduler:
    """Applies the rules above to the events of a scheduler.

    Attributes:
        table: the known programs.
        residency: the contexts on replicas.
        parked: the turns that wait for room.
        turns, saved_tokens: number of turns that have ended, and tokens of their prompts that were cached.
        moved, forced: number of turns that left the replica of their context, and that were admitted at
            their bound.
    """

    def __init__(
        self,
        settings: ProgramsSettings,
        queue: RequestQueue,
        ledger: ReplicaLedger,
        affinity: PrefixAffinity,
        costs: PrefillCosts,
        promotion: PromotionSettings,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._ledger = ledger
        self._affinity = affinity
        self._costs = costs
        self._promotion = promotion
        self.table = ProgramTable()
        self.residency = Residency(self.capacity)
        self.parked = ParkedTurns(settings.order, joins=settings.joins)
        self.turns = self.saved_tokens = self.moved = self.forced = 0
        self._gaps = Gaps()
        self._bound = ExpiryHeap(_bound_until)
        self._overdue = ExpiryHeap(self._overdue_at)
        # Overdue turns that no usable replica can serve, and the replicas that were usable then.
        self._without_replica: dict[ScheduledRequest, None] = {}
        self._usable_before: list[str] = []
        # Tokens that may be computed for forced admissions.
        self._allowance = 0.0
        self._may_have_room = False
        self._room_at: float | None = None
        self._now = 0.0

    # Requests

    def on_arrival(self, scheduled: ScheduledRequest, now: float) -> None:
        """Recognise the program of a new request, and bind or park it if it has one."""
        if not self._settings.enabled:
            return
        turn = scheduled.turn = self.table.on_arrival(scheduled.request, now)
        for forgotten in self.table.forget(now):
            # Most first requests of others are never continued, so they are no evidence about turns.
            if forgotten.ended_at is not None:
                self._gaps.after(forgotten.ending).observe(math.inf)
            self._leave(forgotten)
        if turn is not None:
            if turn.gap_s is not None:
                self._gaps.after(turn.conversation.ending).observe(turn.gap_s)
                turn.program.gap_s += turn.gap_s
                if turn.conversation.ending is TurnEnd.TOOLS:
                    turn.program.tool_gap_s += turn.gap_s
            self._place(scheduled, turn, now)

    def on_enqueue(self, scheduled: ScheduledRequest) -> None:
        """Watch the times of a turn that was queued."""
        turn = scheduled.turn
        if turn is None:
            return
        if turn.parked:
            self._overdue.add(scheduled)
        elif turn.resident_on is not None:
            self._bound.add(scheduled)

    def on_dispatch(self, scheduled: ScheduledRequest, replica: ReplicaState) -> None:
        """Record that a replica holds a request."""
        turn = scheduled.turn
        if turn is None:
            self.residency.evict(replica)
            return
        conversation, replica_id = turn.conversation, replica.spec.replica_id
        if turn.admitted_to != replica_id:
            turn.depth_tokens = None
        self._withdraw(scheduled, turn, scheduled.dispatched_at)
        if conversation.replica_id not in (None, replica_id):
            self._leave(conversation)
            self.moved += 1
        conversation.running += 1
        conversation.replica_id = replica_id
        conversation.evicted = None
        self.residency.of(replica_id).activate(conversation)
        self.residency.evict(replica)

    def on_first_token(self, scheduled: ScheduledRequest, now: float) -> None:
        """Record the first token of a request."""
        turn = scheduled.turn
        if turn is not None and turn.first_token_at is None and scheduled.request.spec.streamed:
            turn.first_token_at = now

    def on_release(self, scheduled: ScheduledRequest, replica_id: str) -> None:
        """Record that a replica no longer holds a request."""
        self._may_have_room = True
        if scheduled.turn is not None:
            scheduled.turn.conversation.running -= 1
        elif (contexts := self.residency.known(replica_id)) is not None:
            contexts.leave(scheduled.prefill_tokens + scheduled.estimate.expected_output_tokens)

    def on_put_back(self, scheduled: ScheduledRequest, now: float) -> None:
        """Place a turn again that its replica has returned, before it is queued."""
        if scheduled.turn is not None:
            scheduled.turn.first_token_at = None
            self._leave(scheduled.turn.conversation)
            self._place(scheduled, scheduled.turn, now)

    def on_end(self, scheduled: ScheduledRequest, now: float, *, dispatched: bool) -> None:
        """Record the end of a request, after it has left its replica or the queue."""
        if dispatched:
            self._earn(scheduled)
        turn = scheduled.turn
        if turn is None:
            return
        self._withdraw(scheduled, turn, now)
        conversation, program = turn.conversation, turn.program
        conversation.turns_open -= 1
        left_queue_at = scheduled.dispatched_at if dispatched else now
        program.queued_s += left_queue_at - scheduled.request.arrived_at
        program.waiting_s += turn.parked_s
        if dispatched:
            program.turns += 1
            program.engine_s += now - left_queue_at
            if turn.first_token_at is not None:
                program.first_token_s += turn.first_token_at - left_queue_at
                program.generation_s += now - turn.first_token_at
            if scheduled.usage is not None:
                program.tokens.add(scheduled.usage, conversation.context_tokens if turn.extends else 0)
            program.service += scheduled.charged
            program.saved_tokens += scheduled.cached_tokens
            self.turns += 1
            self.saved_tokens += scheduled.cached_tokens
            conversation.ended_at = now
            self._learn_capacity(scheduled, turn)
            self._observe(scheduled, conversation)
        elif turn.parked_since is not None and not turn.parked:
            # It was admitted, but its context was never computed.
            self._leave(conversation)
        self._retire(conversation, now)
        self.table.on_end(conversation)
        self.parked.refresh(program)
        self._may_have_room = True

    # Replicas

    def on_replica_change(self) -> None:
        """Try the parked turns again, because replicas or routes have changed."""
        self._may_have_room = True
        self._usable_before = []

    def on_replica_loss(self, replica_id: str) -> list[ScheduledRequest]:
        """Forget the contexts of a lost replica. Return the queued turns that waited for it."""
        for conversation in self.residency.lose(replica_id):
            conversation.replica_id = None
        admitted = [each for each in self._queue if each.turn and each.turn.admitted_to == replica_id]
        for scheduled in admitted:
            if scheduled.turn is not None:
                # A replica that joins with the same id starts with nothing admitted.
                scheduled.turn.admitted_to = None
        return admitted

    # Time

    def release(self, now: float) -> Iterator[ScheduledRequest]:
        """Yield the parked turns that may be queued now; they are bound to a replica."""
        self._now = now
        if not self.parked:
            return
        next_at = self._room_at
        if self._may_have_room or (next_at is not None and next_at <= now):
            self._may_have_room = False
            yield from self._with_room(now)
            self._room_at = self.residency.next_at(now)
        yield from self._forced(now)

    def pop_unbound(self, now: float) -> Iterator[ScheduledRequest]:
        """Yield the queued turns that may leave the replica of their context from now on."""
        for scheduled in self._bound.pop_expired(now):
            assert scheduled.turn is not None
            self._withdraw(scheduled, scheduled.turn, now)
            yield scheduled

    def next_at(self) -> float | None:
        """Return when time alone changes something, or None."""
        overdue_at = self._overdue.next_at() if self.parked else None
        if overdue_at is not None and overdue_at <= self._now:
            # It waits for the allowance or for a replica, which events change.
            overdue_at = None
        return earliest(self._bound.next_at(), overdue_at, self._room_at if self.parked else None)

    def __repr__(self) -> str:
        return f"<ProgramScheduler {self.table} {self.parked} moved={self.moved} forced={self.forced}>"

    def capacity(self, replica: ReplicaState) -> int:
        """Return the KV cache of a replica in tokens, reported or learned."""
        known = replica.spec.kv_tokens
        return self.residency.of(replica.spec.replica_id).capacity.tokens if known is None else known

    # Placement

    def _place(self, scheduled: ScheduledRequest, turn: ProgramTurn, now: float) -> None:
        """Bind a turn to the replica of its context, or park it."""
        turn.resident_on, turn.parked = None, False
        if scheduled.request.bound_to is not None:
            return
        conversation = turn.conversation
        replica_id = self.residency.locate(conversation)
        replica = None if replica_id is None else self._ledger.get(replica_id)
        if replica is not None and replica.is_usable and replica.spec.pool in scheduled.pools:
            if turn.extends:
                known = scheduled.estimate.expected_prompt_tokens - 1
                scheduled.expect_cached(max(0, min(known, conversation.context_tokens)))
            self._admit(scheduled, turn, replica, now)
        elif self._settings.residency and not self._is_small(scheduled):
            turn.parked, turn.parked_since = True, now
            self.parked.add(scheduled)
            self._may_have_room = True

    def _is_small(self, scheduled: ScheduledRequest) -> bool:
        """Return whether a turn needs little of every cache that may serve it, or little time."""
        prompt_tokens = scheduled.estimate.expected_prompt_tokens
        if all(self._costs.of(pool).seconds(prompt_tokens) < _CHEAP_S for pool in scheduled.pools):
            return True
        smallest = min(
            (self.capacity(each) for pool in scheduled.pools for each in self._ledger.of_pool(pool)),
            default=0,
        )
        return scheduled.estimate.expected_tokens < _SMALL_SHARE * smallest

    def _with_room(self, now: float) -> Iterator[ScheduledRequest]:
        """Yield the parked turns that some replica has room for, in their order."""
        rooms, candidates = self._rooms(now), self.parked.candidates(self._queue)
        # Most turns need more than the largest room, so only few are compared with every replica.
        while self.parked.fewest_tokens <= max(rooms.values(), default=-math.inf):
            scheduled = next(candidates, None)
            if scheduled is None:
                return
            most = max(rooms.get(pool, -math.inf) for pool in scheduled.pools)
            if scheduled.estimate.expected_tokens > most:
                continue
            if (replica := self._replica_with_room(scheduled, now)) is not None:
                yield self._admit_parked(scheduled, replica, now)
                rooms = self._rooms(now)

    def _rooms(self, now: float) -> dict[str, float]:
        """Return the largest room of any usable replica, by pool; infinity for an unused replica."""
        rooms: dict[str, float] = {}
        for each in self._ledger:
            if each.is_usable:
                is_unused = self.residency.is_unused(each, now)
                room = math.inf if is_unused else self.residency.room(each, now)
                rooms[each.spec.pool] = max(room, rooms.get(each.spec.pool, room))
        return rooms

    def _replica_with_room(self, scheduled: ScheduledRequest, now: float) -> ReplicaState | None:
        """Return the replica with room for a parked turn that has the most of its prompt, then of room."""
        tokens, prefix = scheduled.estimate.expected_tokens, scheduled.request.submission.prefix
        for pool in scheduled.pools:
            rooms = {
                each.spec.replica_id: room
                for each in self._usable(scheduled, pool)
                if (room := self.residency.room(each, now)) >= tokens or self.residency.is_unused(each, now)
            }
            if len(rooms) > 1 and prefix:
                _, matches = self._affinity.index.better_than("", prefix, _MOST_MATCHES)
                most = max((blocks for name, blocks in matches if name in rooms), default=0)
                longest = [name for name, blocks in matches if blocks == most]
                rooms = {name: rooms[name] for name in longest if name in rooms} or rooms
            if rooms:
                return self._ledger[max(rooms, key=rooms.__getitem__)]
        return None

    def _usable(self, scheduled: ScheduledRequest, pool: str) -> Iterator[ReplicaState]:
        admits = scheduled.request.destination.admits
        for each in self._ledger.of_pool(pool):
            if each.is_usable and admits(each.spec.replica_id, each.spec.adapters):
                yield each

    def _forced(self, now: float) -> Iterator[ScheduledRequest]:
        """Yield parked turns beyond their bound, as far as the allowance permits."""
        if self._without_replica and (usable := self._usable_replicas()) and usable != self._usable_before:
            for scheduled in self._without_replica:
                self._overdue.add(scheduled)
            self._without_replica.clear()
        while self._allowance >= 0 and (at := self._overdue.next_at()) is not None and at <= now:
            scheduled = next(iter(self._overdue.pop_expired(now)))
            found = [each for pool in scheduled.pools for each in self._usable(scheduled, pool)]
            if not found:
                self._without_replica[scheduled] = None
                continue
            replica = max(found, key=lambda each: self.residency.room(each, now))
            self._allowance -= scheduled.estimate.expected_prompt_tokens
            self.forced += 1
            yield self._admit_parked(scheduled, replica, now)
        if self._without_replica:
            self._usable_before = self._usable_replicas()

    def _usable_replicas(self) -> list[str]:
        return [each.spec.replica_id for each in self._ledger if each.is_usable]

    def _earn(self, scheduled: ScheduledRequest) -> None:
        """Let a part of the service of an ended request be used for forced admissions."""
        usage, estimate = scheduled.usage, scheduled.estimate
        if usage is None:
            served = token_service(scheduled.prefill_tokens, estimate.expected_output_tokens)
        else:
            cached = max(usage.cached_tokens, scheduled.cached_tokens)
            served = token_service(usage.prompt_tokens - cached, usage.output_tokens)
        self._allowance = min(_MOST_SAVED, self._allowance + _FORCED_SHARE * served)

    def _admit_parked(
        self, scheduled: ScheduledRequest, replica: ReplicaState, now: float
    ) -> ScheduledRequest:
        turn = scheduled.turn
        assert turn is not None
        self._unpark(scheduled, turn, now)
        prompt_tokens = scheduled.estimate.expected_prompt_tokens
        replica_id = replica.spec.replica_id
        scheduled.expect_cached(self._affinity.cached_on(replica_id, scheduled.request, prompt_tokens))
        self._admit(scheduled, turn, replica, now)
        return scheduled

    def _admit(
        self, scheduled: ScheduledRequest, turn: ProgramTurn, replica: ReplicaState, now: float
    ) -> None:
        """Take room for a turn on a replica, and bind it."""
        replica_id, tokens = replica.spec.replica_id, scheduled.estimate.expected_tokens
        if turn.conversation.replica_id not in (None, replica_id):
            # The replica of its context accepts nothing now.
            self._leave(turn.conversation)
            self.moved += 1
        contexts = self.residency.of(replica_id)
        if replica.spec.kv_tokens is None:
            turn.depth_tokens, turn.content_tokens = _evidence(turn.conversation, contexts, replica)
        contexts.activate(turn.conversation)
        contexts.admitted += tokens
        turn.conversation.replica_id = replica_id
        turn.admitted_to, turn.admitted_tokens = replica_id, tokens
        if self._settings.stay:
            turn.resident_on = replica_id
            saved = scheduled.cached_tokens or scheduled.estimate.expected_prompt_tokens
            turn.bound_until = now + self._costs.of(replica.spec.pool).seconds(saved)

    def _withdraw(self, scheduled: ScheduledRequest, turn: ProgramTurn, now: float) -> None:
        """Remove a turn from the parked ones, and return the room that it takes."""
        self._unpark(scheduled, turn, now)
        if turn.admitted_to is not None:
            if (contexts := self.residency.known(turn.admitted_to)) is not None:
                contexts.admitted -= turn.admitted_tokens
            turn.admitted_to = None

    def _unpark(self, scheduled: ScheduledRequest, turn: ProgramTurn, now: float) -> None:
        if self.parked.remove(scheduled) and turn.parked_since is not None:
            turn.parked_s += now - turn.parked_since
        self._without_replica.pop(scheduled, None)

    # Contexts

    def _learn_capacity(self, scheduled: ScheduledRequest, turn: ProgramTurn) -> None:
        """Learn the capacity of a replica that does not report it, from what was cached of a context."""
        conversation, usage, depth_tokens = turn.conversation, scheduled.usage, turn.depth_tokens
        if depth_tokens is None or usage is None or not turn.extends or conversation.replica_id is None:
            return
        capacity = self.residency.of(conversation.replica_id).capacity
        known = min(usage.prompt_tokens, conversation.context_tokens)
        if 2 * usage.cached_tokens >= known >= _CLEAR_TOKENS:
            # The end of a context is evicted first.
            capacity.on_hit(depth_tokens - (known - usage.cached_tokens))
        elif known >= _CLEAR_TOKENS and turn.content_tokens:
            capacity.on_miss(turn.content_tokens)

    def _observe(self, scheduled: ScheduledRequest, conversation: Conversation) -> None:
        """Learn the context of a conversation after a turn."""
        before, usage = conversation.context_tokens, scheduled.usage
        if usage is None:
            conversation.context_tokens = scheduled.estimate.expected_tokens
            conversation.ending = None
            return
        conversation.context_tokens = usage.prompt_tokens + usage.output_tokens
        conversation.ending = usage.ending
        if before:
            self.residency.observe_growth(conversation.context_tokens - before)

    def _retire(self, conversation: Conversation, now: float) -> None:
        """Start a gap: retain the context for the time that pays."""
        replica = None if conversation.replica_id is None else self._ledger.get(conversation.replica_id)
        if replica is None or not replica.joined:
            self._leave(conversation)
            return
        if conversation.turns_open:
            return
        tokens, capacity = conversation.context_tokens, max(1, self.capacity(replica))
        recompute_s = self._costs.of(replica.spec.pool).seconds(tokens)
        kept_s = self._gaps.after(conversation.ending).retention_s(recompute_s, min(1.0, tokens / capacity))
        until = now + self._settings.retention * kept_s
        self.residency.of(replica.spec.replica_id).retire(conversation, tokens, until)

    def _leave(self, conversation: Conversation) -> None:
        """Forget where the context of a conversation is."""
        if conversation.replica_id is not None:
            if (contexts := self.residency.known(conversation.replica_id)) is not None:
                contexts.remove(conversation)
            conversation.replica_id = None

    def _overdue_at(self, scheduled: ScheduledRequest) -> float:
        turn = scheduled.turn
        if turn is None or turn.parked_since is None or not turn.parked:
            return math.inf
        return turn.parked_since + self._promotion.max_wait_s(scheduled.request.priority)


def _evidence(
    conversation: Conversation, contexts: ReplicaContexts, replica: ReplicaState
) -> tuple[int | None, int]:
    """Return the depth and the content tokens of a turn that is placed; see `ProgramTurn`."""
    if contexts.is_idle(conversation):
        return replica.kv.used() + contexts.depth(conversation), replica.held_tokens + contexts.depth()
    replica_id, depth_tokens = conversation.evicted or ("", 0)
    return (depth_tokens, 0) if replica_id == replica.spec.replica_id else (None, 0)


def _bound_until(scheduled: ScheduledRequest) -> float:
    turn = scheduled.turn
    return math.inf if turn is None or turn.resident_on is None else turn.bound_until


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One program.

    Attributes:
        program: the id that its client stated, or the id of its first request.
        state: `running`, `waiting` (for room), `queued` (for a replica) or `in a gap`.
        replicas: the replicas with its contexts.
        context_tokens: tokens of the last contexts of all its conversations.
        turns, saved_tokens: number of its turns so far, and the tokens of their prompts that were cached.
        queued_s, waiting_s, engine_s, gap_s: as in `Program`.
    """

    program: str
    tenant: str
    state: str
    conversations: int
    replicas: tuple[str, ...]
    context_tokens: int
    turns: int
    saved_tokens: int
    queued_s: float
    waiting_s: float
    engine_s: float
    gap_s: float
    age_s: float


# Examining all of them would delay grants.
_EXAMINED = 1_000


def programs_document(programs: ProgramScheduler, now: float, most: int) -> dict[str, Any]:
    """Return sums, the recent programs by state, and the rows of the last `most` of them."""
    recent = programs.table.recent(_EXAMINED)
    return {
        "known": programs.table.program_count,
        "recent_by_state": dict(Counter(_state(programs, program) for program in recent)),
        "parked": len(programs.parked),
        "turns": programs.turns,
        "saved_tokens": programs.saved_tokens,
        "moved": programs.moved,
        "forced": programs.forced,
        "rows": [asdict(_row(programs, program, now)) for program in recent[:most]],
    }


def program_document(programs: ProgramScheduler, program: Program, now: float) -> dict[str, Any]:
    """Return the row of one program, and where its time went."""
    return {
        **asdict(_row(programs, program, now)),
        "first_token_s": program.first_token_s,
        "generation_s": program.generation_s,
        "tool_gap_s": program.tool_gap_s,
        "tokens": asdict(program.tokens),
    }


def _row(programs: ProgramScheduler, program: Program, now: float) -> ProgramRow:
    tenant, name = program.key
    conversations = program.conversations
    return ProgramRow(
        program=name,
        tenant=tenant,
        state=_state(programs, program),
        conversations=len(conversations),
        replicas=tuple(sorted({each.replica_id for each in conversations if each.replica_id is not None})),
        context_tokens=sum(each.context_tokens for each in conversations),
        turns=program.turns,
        saved_tokens=program.saved_tokens,
        queued_s=program.queued_s,
        waiting_s=program.waiting_s,
        engine_s=program.engine_s,
        gap_s=program.gap_s,
        age_s=now - program.started_at,
    )


def _state(programs: ProgramScheduler, program: Program) -> str:
    if program.running:
        return "running"
    if programs.parked.of_program(program):
        return "waiting"
    return "queued" if any(each.turns_open for each in program.conversations) else "in a gap"
