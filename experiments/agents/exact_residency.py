"""Exact residency: the residency model of the program scheduler with the true contents of simulated caches.

vLLM can publish which blocks it stores and evicts (KV events). This class measures what that could gain at
most: it reads the caches of the engines without delay, loss or cost. It replaces three estimates:

- whether a context in a gap is still cached,
- how many of its tokens are,
- whether a context that the model considers evicted is cached after all.

A context counts as evicted if less than half of it is cached. It does as well if its room was promised to
another turn, even if it is still cached. The tokens that requests in flight hold remain estimates,
because KV events do not report what a request is about to use. A conversation without a stated session is
modelled as in production.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from serve_app.core.programs.program import Conversation
from serve_app.core.programs.residency import ReplicaContexts, Residency
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.lab.simulation.simulation import SimulatedReplica

_RESIDENT_SHARE = 0.5


class _ExactContexts(ReplicaContexts):
    __slots__ = ()

    def resize(self, conversation: Conversation, tokens: int) -> None:
        """Correct the tokens of a context in a gap."""
        entry = self._idle[conversation]
        self._idle_tokens += tokens - entry.tokens
        entry.tokens = tokens
        self._valid_until = -math.inf


class ExactResidency(Residency):
    """Residency that reads the caches of simulated engines.

    Args:
        engines: the engines by the ids of their replicas.
        submitted: block hashes of prompt and answer of the latest submitted turn, by session.
    """

    def __init__(
        self,
        capacity: Callable[[ReplicaState], int],
        engines: Mapping[str, SimulatedReplica],
        submitted: Mapping[str, Sequence[int]],
    ) -> None:
        super().__init__(capacity)
        self._engines = engines
        self._submitted = submitted
        # Those of the latest turn that has arrived. The next turn is submitted before its gap has passed.
        self._arrived: dict[str, Sequence[int]] = {}
        self._read_at: dict[str, float] = {}
        self._states: dict[str, ReplicaState] = {}

    def of(self, replica_id: str) -> ReplicaContexts:
        """Return the contexts of a replica."""
        return self._replicas.setdefault(replica_id, _ExactContexts())

    def locate(self, conversation: Conversation) -> str | None:
        """Return the replica that has a conversation's context cached and not promised to others."""
        before, session = conversation.replica_id, conversation.session
        hashes = self._arrived.get(session)
        if session in self._submitted:
            self._arrived[session] = self._submitted[session]
        if hashes is None or (before is not None and conversation in self.of(before).active):
            return before
        if before is None:
            cached = {name: self._cached(name, hashes) for name in self._fitting(conversation.context_tokens)}
            best = max(cached, key=cached.__getitem__, default=None)
            return best if best is not None and cached[best] >= _RESIDENT_SHARE else None
        if self._cached(before, hashes) < _RESIDENT_SHARE:
            self.of(before).remove(conversation)
            conversation.replica_id = None
        return conversation.replica_id

    def room(self, replica: ReplicaState, now: float) -> int:
        """Return the tokens that another conversation may use."""
        if self._read_at.get(replica.spec.replica_id) != now:
            self._read_at[replica.spec.replica_id] = now
            self.evict(replica)
        return super().room(replica, now)

    def evict(self, replica: ReplicaState) -> None:
        """Forget the contexts that a replica has evicted or will evict, and correct the lengths of others."""
        name = replica.spec.replica_id
        self._states[name] = replica
        contexts = self.of(name)
        assert isinstance(contexts, _ExactContexts)
        for conversation, _ in list(contexts.idle()):
            hashes = self._arrived.get(conversation.session)
            if hashes is None:
                continue
            cached = self._cached(name, hashes)
            if cached < _RESIDENT_SHARE:
                contexts.remove(conversation)
                conversation.replica_id = None
            else:
                contexts.resize(conversation, int(cached * conversation.context_tokens))
        super().evict(replica)

    def _fitting(self, tokens: int) -> Iterator[str]:
        """Yield the replicas on which a context of so many tokens would not be evicted if it were oldest."""
        for name, replica in self._states.items():
            contexts = self.of(name)
            free = self._capacity(replica) - replica.held_tokens - contexts.admitted
            if tokens + sum(each for _, each in contexts.idle()) <= free:
                yield name

    def _cached(self, replica_id: str, hashes: Sequence[int]) -> float:
        """Return the share of a context that is cached."""
        engine = self._engines[replica_id].model
        # Engines evict the end of a context first, so the cached blocks are the leading ones.
        leading = bisect_left(hashes, True, key=lambda block: not engine.cached_blocks((block,)))
        return leading / max(1, len(hashes))
