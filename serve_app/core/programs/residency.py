"""Contexts of programs in the KV caches: their place, the room for others, and the gaps between turns.

- `Residency`: the contexts in the KV cache of each replica, and the room for another one.
- `LearnedCapacity`: the size of a KV cache that a replica does not report.
- `Gaps`: learned gaps between the turns of a conversation, and the time to retain its context in a gap.

`Residency`. An engine evicts the blocks that were used least recently. So a context in a gap stays cached as
long as

    tokens held by requests in flight + admitted but not dispatched
    + contexts in a gap, this one and those used later
    + tokens that requests without a program have left since its last use

fit into the cache. A context that no longer does is not resident, and loses nothing but its cache.

`room` is what another conversation may use without the eviction of a context that is to be retained. Contexts
in a gap are retained for the time that `Gaps` computes. Because the oldest are evicted first, a context that
need not be retained still takes room while an older one is retained.

Each turn adds to its context. `room` leaves the mean growth of a few turns free for every context in use or
to be retained; otherwise contexts would soon have to leave again.

Invariants, named as in the tests:
- `a_context_is_on_one_replica`: each conversation is in at most one of the sets.
- `what_is_admitted_is_dispatched_or_returned`: `admitted` is the sum over the turns that were admitted to the
  replica and neither dispatched nor removed.

`LearnedCapacity`. The engine's counts of cached tokens bracket it. The model of a replica's contexts yields
the tokens that were used after a context, and all tokens that should be cached:

- A context that is cached shows that at least it and what was used after it fit.
- A context that should be cached and is not shows that not all fit.

The capacity in use is up to `_GROWTH` times what was shown to fit, so that more is tried, but less than what
was shown not to fit. The steps are small, because contexts that are wrongly expected to be cached cost more
than room that is not used. The upper bound rises slowly, and faster while contexts beyond it are cached: a
miss may have other causes, such as other clients of the engine. Engines that never report cached tokens show
nothing, and the assumed capacity remains.

`Gaps`. Whether a conversation returns soon depends on how its last turn ended: after calls of tools the
median gap of recorded coding sessions is 1 s, after a complete answer nearly 3 min. The distribution is
learned for each way of ending, as a histogram whose older observations have less weight.

A context in a gap holds room that another program could use. Let it go after time `T`, and the expected cost
of the gap `G` is

    price * E[min(G, T)] + P(G > T) * recompute_s

`price` is the share of the replica's cache that the context holds: so much of the replica is out of use while
others wait. `recompute_s` is the time to compute the context again. `retention_s` returns the `T` with the
lowest cost. For long contexts, both grow alike, so `T` depends on their ratio and on the gaps alone. It only
matters while other programs wait for room: nothing is released before.

Source: the ski-rental problem with a known distribution (Karlin et al., "Competitive randomized algorithms
for nonuniform problems", 1994). Continuum (arXiv 2511.02230) and SAECache (arXiv 2605.18825) retain contexts
for a learned time as well, inside the engine.
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_app.core.programs.program import Conversation
from serve_app.core.routing.prefix import LIKELY_KV_TOKENS
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.request import TurnEnd

_GROWTH = 1.05
# Per context beyond the upper bound that is cached, and per any that is cached.
_RISE, _DRIFT = 1.02, 1.0002


class LearnedCapacity:
    """Bracket of the capacity of one replica."""

    def __init__(self) -> None:
        self._least, self._most = 0.0, math.inf
        self._reports_cached = False

    @property
    def tokens(self) -> int:
        """The capacity in use, in tokens."""
        return int(min(max(LIKELY_KV_TOKENS, _GROWTH * self._least), self._most))

    def on_hit(self, depth_tokens: int) -> None:
        """Learn that a context was cached, with so many tokens of it and used after it."""
        self._reports_cached = True
        is_beyond = depth_tokens >= self.tokens
        self._most = max(_DRIFT * self._most, _RISE * depth_tokens if is_beyond else 0.0)
        self._least = max(self._least, depth_tokens)

    def on_miss(self, content_tokens: int) -> None:
        """Learn that a context was not cached although all contents would fit into so many tokens."""
        if self._reports_cached:
            self._most = min(self._most, content_tokens)
            self._least = min(self._least, self._most)

    def __repr__(self) -> str:
        return f"<LearnedCapacity {self.tokens} of {self._least:.0f} to {self._most:.0f}>"


# Upper edges of the bins, in seconds: two for each octave from 1/8 s to nine hours. The last bin has no end.
_EDGES = tuple(2 ** (half / 2) for half in range(-6, 31))
# Percentiles of recorded coding sessions, as the edge below which so much of the gaps lies. They count as so
# many observations as `_PRIOR_WEIGHT`.
_PRIORS: dict[TurnEnd, tuple[tuple[float, float], ...]] = {
    TurnEnd.TOOLS: ((0.5, 1.1), (0.75, 10.0), (0.9, 60.0), (0.99, 606.0)),
    TurnEnd.DONE: ((0.1, 0.5), (0.5, 174.0), (0.9, 2_603.0), (0.99, 38_077.0)),
}
_PRIOR_WEIGHT = 20.0
# Weight of an observation over that of the one before: about the last five hundred count.
_WEIGHT_GROWTH = 1.002
_MOST_WEIGHT = 1e12
# Observations after which the retention is computed again.
_STALE_AFTER = 20
# Ratios of the two costs are rounded to a third of an octave, so that few retentions are computed.
_RATIOS_PER_OCTAVE = 3


class GapTimes:
    """The distribution of gaps after one way of ending."""

    def __init__(self, prior: tuple[tuple[float, float], ...]) -> None:
        self._counts = [0.0] * (len(_EDGES) + 1)
        self._observed = 0
        # Later observations weigh more, instead of decaying all earlier ones each time.
        self._weight = 1.0
        self._retentions: dict[int, float] = {}
        below = 0.0
        for share, seconds in (*prior, (1.0, math.inf)):
            self._counts[bisect_right(_EDGES, seconds)] += _PRIOR_WEIGHT * (share - below)
            below = share

    def observe(self, gap_s: float) -> None:
        """Learn from one gap; infinite if the conversation did not return."""
        self._weight *= _WEIGHT_GROWTH
        self._counts[bisect_right(_EDGES, gap_s)] += self._weight
        if self._weight > _MOST_WEIGHT:
            self._counts = [count / self._weight for count in self._counts]
            self._weight = 1.0
        self._observed += 1
        if self._observed % _STALE_AFTER == 0:
            self._retentions.clear()

    def retention_s(self, recompute_s: float, price: float) -> float:
        """Return the time for which to retain a context, in seconds.

        Args:
            recompute_s: time to compute the context again.
            price: cost of a second of retention, in the same unit as a second of computing.
        """
        ratio = round(_RATIOS_PER_OCTAVE * math.log2(max(recompute_s, 1e-6) / max(price, 1e-6)))
        known = self._retentions.get(ratio)
        if known is None:
            known = self._retentions[ratio] = self._cheapest(2 ** (ratio / _RATIOS_PER_OCTAVE))
        return known

    def _cheapest(self, recompute: float) -> float:
        """Return the cheapest time if a second of retention costs 1."""
        total = left = sum(self._counts)
        held = lower = best_s = 0.0
        best = recompute
        for upper, count in zip(_EDGES, self._counts, strict=False):
            # Those that return in this bin are held for half of it, the others for all of it.
            held += (upper - lower) * (left - count / 2)
            left -= count
            lower = upper
            cost = (held + left * recompute) / total
            if cost < best:
                best, best_s = cost, upper
        return best_s

    def __repr__(self) -> str:
        return f"<GapTimes n={self._observed}>"


class Gaps:
    """The gaps after each way of ending. An unknown one counts as calls of tools, the most frequent."""

    def __init__(self) -> None:
        self._tools, self._done = (GapTimes(_PRIORS[one]) for one in (TurnEnd.TOOLS, TurnEnd.DONE))

    def after(self, ending: TurnEnd | None) -> GapTimes:
        """Return the distribution of gaps after a way of ending."""
        return self._tools if ending in (None, TurnEnd.TOOLS) else self._done

    def __repr__(self) -> str:
        return f"<Gaps after tools {self._tools}, otherwise {self._done}>"


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
