"""Load balancers without a gateway that several experiments play.

Those that consider prefix caches know the caches and the progress of all engines exactly and at once, as no
real load balancer does.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from serve_app.lab.simulation.run import DirectSimulation
from serve_app.lab.simulation.simulation import OnEnd, ReplicaPlan, SimulatedReplica, SimulatedRequest
from serve_app.lab.workloads import plain_stream


class RoundRobin(DirectSimulation):
    """Every engine in turn."""

    def choose(self, able: Sequence[SimulatedReplica], _simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the engine whose turn it is."""
        return self.in_turn(able)[0]


class PowerOfTwo(DirectSimulation):
    """The less busy of two random engines, as load balancers without shared state do."""

    def __init__(
        self, plans: Sequence[ReplicaPlan], on_end: OnEnd = lambda _simulated, _record: None
    ) -> None:
        super().__init__(plans, on_end)
        self._chance: random.Random = plain_stream(0, "power of two")

    def choose(self, able: Sequence[SimulatedReplica], _simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the less busy of two."""
        drawn = self._chance.sample(able, min(2, len(able)))
        return min(drawn, key=lambda replica: self.outstanding[replica.spec.replica_id])


class EngineState(NamedTuple):
    """State of an engine from the view of one request.

    Attributes:
        new_tokens: tokens of its prompt that are not cached.
        pending_tokens: prompt tokens of other requests that are not computed.
        requests: requests in flight.
    """

    new_tokens: int
    pending_tokens: int
    requests: int


class CacheAware(DirectSimulation):
    """The engine with the least cost, in turn among equals."""

    @abstractmethod
    def cost(self, state: EngineState) -> tuple[float, ...]:
        """Return the cost of an engine."""

    def choose(self, able: Sequence[SimulatedReplica], simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the engine with the least cost."""
        return min(self.in_turn(able), key=lambda replica: self.cost(self._state(replica, simulated)))

    def _state(self, replica: SimulatedReplica, simulated: SimulatedRequest) -> EngineState:
        block = replica.model.settings.block_size
        cached = block * replica.model.cached_blocks(simulated.block_hashes)
        pending = 0
        for other, at in self.live.values():
            sequence = other.sequence
            if at is not replica or sequence is None or sequence.first_token_at is not None:
                continue
            computed = sequence.computed_tokens
            if sequence.scheduled_at is None:
                computed = block * replica.model.cached_blocks(other.block_hashes)
            pending += max(1, sequence.tokens_to_compute - computed)
        requests = self.outstanding[replica.spec.replica_id]
        return EngineState(max(1, simulated.prompt_tokens - cached), pending, requests)


class LMetric(CacheAware):
    """(New tokens + pending tokens) * (batch size + 1). Source: LMetric (arXiv 2603.15202)."""

    def cost(self, state: EngineState) -> tuple[float, ...]:
        """Return the product."""
        return ((state.new_tokens + state.pending_tokens) * (state.requests + 1),)


class StickyUntilSaturated(CacheAware):
    """The longest cached prefix among engines with few pending tokens, else the least busy engine.

    Source: the default of llm-d since August 2026.
    """

    _SATURATED_TOKENS = 8_192

    def cost(self, state: EngineState) -> tuple[float, ...]:
        """Return the cost, which is lower for any engine that is not saturated."""
        if state.pending_tokens <= self._SATURATED_TOKENS:
            return 0.0, float(state.new_tokens), float(state.pending_tokens)
        return 1.0, float(state.requests), float(state.pending_tokens)
