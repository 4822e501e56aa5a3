"""Simulation without a gateway: every request is sent to an engine when it arrives.

This is the baseline of a load balancer in front of engines. It knows exactly and immediately how many
requests each engine has, which is the best that a load balancer can know. Each engine orders its requests
itself.
"""

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


@dataclass(slots=True)
class DirectSimulation:
    """A run without a scheduler. Subclasses choose engines in other ways.

    Attributes:
        on_end: called at the end of each request, with its record.
        records: completed requests in the order of completion.
        live: requests on engines, with their engine.
        outstanding: number of requests by engine.
    """

    plans: Sequence[ReplicaPlan]
    on_end: OnEnd = lambda _simulated, _record: None
    timeline: Timeline = field(init=False, default_factory=Timeline)
    replicas: list[SimulatedReplica] = field(init=False)
    records: list[RequestRecord] = field(init=False, default_factory=list)
    live: dict[str, tuple[SimulatedRequest, SimulatedReplica]] = field(init=False, default_factory=dict)
    outstanding: dict[str, int] = field(init=False)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.replicas = [SimulatedReplica(plan, self.timeline, self._step_ended) for plan in self.plans]
        self.outstanding = {plan.replica_id: 0 for plan in self.plans}

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
        request, prompt_tokens = simulated.request, simulated.prompt_tokens
        replica = self._pick(simulated)
        self.outstanding[replica.spec.replica_id] += 1
        simulated.sequence = EngineSequence(
            request.request_id,
            prompt_tokens,
            simulated.output_tokens,
            self.timeline.now,
            priority=request.priority.rank,
            block_hashes=simulated.block_hashes,
        )
        self.live[request.request_id] = (simulated, replica)
        replica.accept(simulated.sequence)

    def _pick(self, simulated: SimulatedRequest) -> SimulatedReplica:
        total_tokens = simulated.prompt_tokens + simulated.output_tokens
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
        return self.choose(able, simulated)

    def choose(
        self,
        able: Sequence[SimulatedReplica],
        simulated: SimulatedRequest,  # noqa: ARG002 - for subclasses
    ) -> SimulatedReplica:
        """Return the engine for a request: of those that can hold it, the least busy one."""
        return min(self.in_turn(able), key=lambda replica: self.outstanding[replica.spec.replica_id])

    def in_turn(self, able: Sequence[SimulatedReplica]) -> list[SimulatedReplica]:
        """Return the engines, the next in turn first, so that equally busy engines alternate."""
        start = self._turn % len(able)
        self._turn += 1
        return [*able[start:], *able[:start]]

    def _step_ended(self, outcome: StepOutcome) -> None:
        for sequence in outcome.finished:
            simulated, replica = self.live.pop(sequence.sequence_id)
            self.outstanding[replica.spec.replica_id] -= 1
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
