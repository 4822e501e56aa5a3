"""Residency: which contexts are in the KV cache of each replica, and the room for another one.

An engine evicts the blocks that were used least recently. So a context in a gap stays cached as long as

    tokens held by requests in flight + admitted but not dispatched
    + contexts in a gap, this one and those used later
    + tokens that requests without a program have left since its last use

fit into the cache. A context that no longer does is not resident, and loses nothing but its cache.

`room` is what another conversation may use without the eviction of a context that is to be retained. Contexts
in a gap are retained for the time that `gaps` computes. Because the oldest are evicted first, a context that
need not be retained still takes room while an older one is retained.

Each turn adds to its context. `room` leaves the mean growth of a few turns free for every context in use or
to be retained; otherwise contexts would soon have to leave again.

Invariants, named as in the tests:
- `a_context_is_on_one_replica`: each conversation is in at most one of the sets.
- `what_is_admitted_is_dispatched_or_returned`: `admitted` is the sum over the turns that were admitted to the
  replica and neither dispatched nor removed.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_app.core.programs.capacity import LearnedCapacity
from serve_app.core.programs.program import Conversation
from serve_app.core.routing.replica_state import ReplicaState

# Turns for whose growth there is room when a conversation is admitted. In simulated coding sessions, engines
# compute half as many tokens again with 1 as with 5.
_GROWTH_TURNS = 5
# Weight of a turn in the mean growth: about the last hundred.
_GROWTH_WEIGHT = 0.01


@dataclass(slots=True)
class _Idle:
    """A context in a gap."""

    tokens: int
    retained_until: float
    left_before: int


class ReplicaContexts:
    """The contexts on one replica.

    Attributes:
        active: conversations with an admitted or running turn on it.
        capacity: learns its capacity; only used if the replica does not report it.
        admitted: tokens of the turns that were admitted and not dispatched yet.
    """

    __slots__ = (
        "_idle",
        "_idle_tokens",
        "_left",
        "_retained",
        "_retained_count",
        "_valid_until",
        "active",
        "admitted",
        "capacity",
    )

    def __init__(self) -> None:
        # Least recently used first.
        self._idle: OrderedDict[Conversation, _Idle] = OrderedDict()
        self._idle_tokens = 0
        self.active: set[Conversation] = set()
        self.capacity = LearnedCapacity()
        self.admitted = 0
        # Tokens that other requests have left so far.
        self._left = 0
        self._retained, self._retained_count, self._valid_until = 0, 0, math.inf

    def __len__(self) -> int:
        """Return the number of conversations with a context on it."""
        return len(self._idle) + len(self.active)

    def in_use(self, now: float) -> int:
        """Return the number of contexts that are active or to be retained."""
        self.retained(now)
        return self._retained_count + len(self.active)

    def idle(self) -> Iterator[tuple[Conversation, int]]:
        """Yield the contexts in a gap and their tokens, the least recently used first."""
        for conversation, entry in self._idle.items():
            yield conversation, entry.tokens

    def depth(self, conversation: Conversation | None = None) -> int:
        """Return the tokens of a context in a gap and of what was used after it; None for the oldest one."""
        tokens = left = 0
        for each, entry in reversed(self._idle.items()):
            tokens, left = tokens + entry.tokens, self._left - entry.left_before
            if each is conversation:
                break
        return tokens + left

    def holds(self, conversation: Conversation) -> bool:
        """Return whether a conversation's context is here."""
        return conversation in self._idle or conversation in self.active

    def is_idle(self, conversation: Conversation) -> bool:
        """Return whether a conversation is in a gap with its context here."""
        return conversation in self._idle

    def activate(self, conversation: Conversation) -> None:
        """Count a conversation as active."""
        self._drop(conversation)
        self.active.add(conversation)

    def retire(self, conversation: Conversation, tokens: int, retained_until: float) -> None:
        """Count an active conversation as in a gap."""
        self.remove(conversation)
        self._idle[conversation] = _Idle(tokens, retained_until, self._left)
        self._idle_tokens += tokens
        self._valid_until = -math.inf

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation."""
        self.active.discard(conversation)
        self._drop(conversation)

    def leave(self, tokens: int) -> None:
        """Count the tokens that a request without a program leaves in the cache."""
        if self._idle:
            self._left += tokens
            self._valid_until = -math.inf

    def evict(self, free_tokens: int) -> list[Conversation]:
        """Remove the oldest contexts in a gap until the others fit. Return them.

        Args:
            free_tokens: tokens of the cache that no request holds and that are not admitted.
        """
        evicted = []
        while self._idle:
            conversation, oldest = next(iter(self._idle.items()))
            if self._idle_tokens + self._left - oldest.left_before <= free_tokens:
                break
            self._drop(conversation)
            evicted.append(conversation)
        return evicted

    def retained(self, now: float) -> int:
        """Return the tokens that are not evicted as long as the contexts to retain are not."""
        if now < self._valid_until:
            return self._retained
        tokens, self._retained, self._retained_count, self._valid_until = 0, 0, 0, math.inf
        for entry in reversed(self._idle.values()):
            tokens += entry.tokens
            if entry.retained_until > now:
                self._retained = tokens + self._left - entry.left_before
                self._retained_count += 1
                self._valid_until = min(self._valid_until, entry.retained_until)
        return self._retained

    def next_at(self, now: float) -> float:
        """Return when time alone increases the room; infinity if it does not."""
        self.retained(now)
        return self._valid_until

    def _drop(self, conversation: Conversation) -> None:
        entry = self._idle.pop(conversation, None)
        if entry is not None:
            self._idle_tokens -= entry.tokens
            self._valid_until = -math.inf

    def __repr__(self) -> str:
        return f"<ReplicaContexts active={len(self.active)} idle={len(self._idle)} admitted={self.admitted}>"


class Residency:
    """The contexts on all replicas of a model.

    Args:
        capacity: returns the KV cache of a replica in tokens.
    """

    def __init__(self, capacity: Callable[[ReplicaState], int]) -> None:
        self._capacity = capacity
        self._replicas: dict[str, ReplicaContexts] = {}
        self.growth_tokens = 0.0
        self._turns = 0

    def of(self, replica_id: str) -> ReplicaContexts:
        """Return the contexts of a replica."""
        found = self._replicas.get(replica_id)
        if found is None:
            found = self._replicas[replica_id] = ReplicaContexts()
        return found

    def known(self, replica_id: str) -> ReplicaContexts | None:
        """Return the contexts of a replica, or None if it never had any."""
        return self._replicas.get(replica_id)

    def locate(self, conversation: Conversation) -> str | None:
        """Return the replica with the context of a conversation. Simulations may know it exactly."""
        return conversation.replica_id

    def room(self, replica: ReplicaState, now: float) -> int:
        """Return the tokens that another conversation may use."""
        contexts = self.of(replica.spec.replica_id)
        growth = int(_GROWTH_TURNS * self.growth_tokens * contexts.in_use(now))
        free = self._capacity(replica) - replica.held_tokens - contexts.admitted
        return free - contexts.retained(now) - growth

    def is_unused(self, replica: ReplicaState, now: float) -> bool:
        """Return whether a replica runs nothing, expects nothing and retains nothing."""
        contexts = self.of(replica.spec.replica_id)
        return not (replica.in_flight or contexts.active or contexts.retained(now))

    def evict(self, replica: ReplicaState) -> None:
        """Forget the contexts that no longer fit into the cache of a replica."""
        contexts = self._replicas.get(replica.spec.replica_id)
        if contexts is not None:
            free = self._capacity(replica) - replica.held_tokens - contexts.admitted
            for conversation in contexts.evict(free):
                conversation.replica_id = None
                if replica.spec.kv_tokens is None:
                    used_since = contexts.depth() + replica.kv.used()
                    conversation.evicted = replica.spec.replica_id, conversation.context_tokens + used_since

    def lose(self, replica_id: str) -> list[Conversation]:
        """Forget all contexts of a lost replica. Return those of its active conversations."""
        contexts = self._replicas.pop(replica_id, None)
        if contexts is None:
            return []
        for conversation, _ in contexts.idle():
            conversation.replica_id = None
        return list(contexts.active)

    def observe_growth(self, tokens: int) -> None:
        """Learn how many tokens a turn adds to its context."""
        self._turns += 1
        weight = max(_GROWTH_WEIGHT, 1 / self._turns)
        self.growth_tokens += weight * (max(0, tokens) - self.growth_tokens)

    def next_at(self, now: float) -> float | None:
        """Return when time alone increases the room on any replica, or None."""
        at = min((contexts.next_at(now) for contexts in self._replicas.values()), default=math.inf)
        return None if at == math.inf else at

    def __repr__(self) -> str:
        return f"<Residency {self._replicas}>"
