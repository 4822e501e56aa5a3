"""Simulation without a gateway: every request is sent to an engine when it arrives.

This is the baseline of a load balancer in front of engines. It knows exactly and immediately how many
requests each engine has, which is the best that a load balancer can know. Each engine orders its requests
itself.
"""

import enum
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from serve_app.core.metrics.record import RequestRecord
from serve_app.engines.model.model import StepOutcome
from serve_app.engines.model.sequences import EngineSequence
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import (
    OnEnd,
    Phase,
    ReplicaPlan,
    SimulatedReplica,
    SimulatedRequest,
    Timeline,
)
from serve_app.lab.workloads.generators import plain_stream


class Balance(enum.StrEnum):
    """Algorithm by which a load balancer chooses an engine among those with a sufficient context."""

    LEAST_OUTSTANDING = "least-outstanding"
    POWER_OF_TWO = "power-of-two"
    """The less busy of two random engines, as load balancers without shared state do."""
    ROUND_ROBIN = "round-robin"
    SESSION_HASH = "session-hash"
    """The engine of the session's hash, whatever its load."""
    KV_OVERLAP = "kv-overlap"
    """The least `prefill blocks + active blocks`, including the request's own blocks that are not cached."""


# Dynamo's router, with its default weight of the overlap (1.0) and temperature (0):
# https://docs.nvidia.com/dynamo/latest/components/router/README.html. It learns cached blocks from events of
# the engines; here it reads them from the engines themselves, without delay.


@dataclass(slots=True)
class DirectSimulation:
    """A run without a scheduler. `records` has completed requests in the order of completion.

    Attributes:
        on_end: called at the end of each request, with its record.
    """

    plans: Sequence[ReplicaPlan]
    balance: Balance = Balance.LEAST_OUTSTANDING
    on_end: OnEnd = lambda _simulated, _record: None
    timeline: Timeline = field(init=False, default_factory=Timeline)
    replicas: list[SimulatedReplica] = field(init=False)
    records: list[RequestRecord] = field(init=False, default_factory=list)
    _outstanding: dict[str, int] = field(init=False)
    _live: dict[str, tuple[SimulatedRequest, SimulatedReplica]] = field(init=False, default_factory=dict)
    _turn: int = field(init=False, default=0)
    _chance: random.Random = field(init=False, default_factory=lambda: plain_stream(0, "power of two"))

    def __post_init__(self) -> None:
        self.replicas = [SimulatedReplica(plan, self.timeline, self._step_ended) for plan in self.plans]
        self._outstanding = {plan.replica_id: 0 for plan in self.plans}

    def run(self, requests: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Play all requests to their end and return their records.

        Raises:
            ValueError: a request fits no engine.
        """
        arrivals = ((each.request.arrived_at, partial(self._arrive, each)) for each in requests)
        self.timeline.schedule_all(Phase.ARRIVAL, arrivals)
        self.timeline.run()
        return self.records

    def submit(self, simulated: SimulatedRequest) -> None:
        """Add a request during the run, which reaches an engine now or later at its `arrived_at`."""
        at = max(simulated.request.arrived_at, self.timeline.now)
        self.timeline.schedule(at, Phase.ARRIVAL, partial(self._arrive, simulated))

    def _arrive(self, simulated: SimulatedRequest) -> None:
        request, prompt_tokens = simulated.request, simulated.counted_tokens
        replica = self._pick(simulated)
        self._outstanding[replica.spec.replica_id] += 1
        simulated.sequence = EngineSequence(
            request.request_id,
            prompt_tokens,
            simulated.output_tokens,
            self.timeline.now,
            priority=request.priority.rank,
            block_hashes=simulated.block_hashes,
        )
        self._live[request.request_id] = (simulated, replica)
        replica.accept(simulated.sequence)

    def _pick(self, simulated: SimulatedRequest) -> SimulatedReplica:
        total_tokens = simulated.counted_tokens + simulated.output_tokens
        bound_to = simulated.request.bound_to
        able = [
            replica
            for replica in self.replicas
            if replica.spec.max_model_len >= total_tokens and bound_to in (None, replica.spec.replica_id)
        ]
        if not able:
            raise ValueError(
                f"a request of {total_tokens:,} tokens exceeds the context of all engines: drop it before "
                "the run"
            )
        if self.balance is Balance.POWER_OF_TWO:
            drawn = self._chance.sample(able, min(2, len(able)))
            return min(drawn, key=lambda replica: self._outstanding[replica.spec.replica_id])
        if self.balance is Balance.SESSION_HASH:
            hint = simulated.request.submission.program
            return able[zlib.crc32((hint.session if hint else "").encode()) % len(able)]
        # The engine next in turn comes first, so that equally busy engines alternate.
        start = self._turn % len(able)
        self._turn += 1
        in_turn = able[start:] + able[:start]
        if self.balance is Balance.ROUND_ROBIN:
            return in_turn[0]
        if self.balance is Balance.KV_OVERLAP:
            return min(in_turn, key=lambda replica: self._kv_cost(replica, simulated))
        return min(in_turn, key=lambda replica: self._outstanding[replica.spec.replica_id])

    def _kv_cost(self, replica: SimulatedReplica, simulated: SimulatedRequest) -> int:
        """Return the tokens to prefill and the tokens in use on an engine, with this request."""
        prompt_tokens, block_size = simulated.counted_tokens, replica.model.settings.block_size
        prompt_blocks = simulated.block_hashes[: prompt_tokens // block_size]
        prefill = prompt_tokens - block_size * replica.model.cached_blocks(prompt_blocks)
        active = prompt_tokens
        for other, where in self._live.values():
            if where is replica and other.sequence is not None:
                active += other.counted_tokens
                if other.sequence.first_token_at is None:
                    prefill += other.counted_tokens - other.sequence.computed_tokens
        return prefill + active

    def _step_ended(self, outcome: StepOutcome) -> None:
        for sequence in outcome.finished:
            simulated, replica = self._live.pop(sequence.sequence_id)
            self._outstanding[replica.spec.replica_id] -= 1
            record = _record(simulated, sequence, replica)
            self.records.append(record)
            self.on_end(simulated, record)


def _record(
    simulated: SimulatedRequest, sequence: EngineSequence, replica: SimulatedReplica
) -> RequestRecord:
    request = simulated.request
    assert sequence.finished_at is not None
    return RequestRecord(
        request_id=request.request_id,
        arrived_at=request.arrived_at,
        dispatched_at=sequence.arrived_at,
        first_token_at=sequence.first_token_at,
        finished_at=sequence.finished_at,
        outcome=Outcome.COMPLETED,
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.target_tokens,
        tenant=request.tenant,
        priority=request.priority,
        pool=replica.spec.pool,
        replica=replica.spec.replica_id,
        preemptions=sequence.preemptions,
    )
