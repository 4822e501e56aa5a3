"""Several production schedulers on one simulated fleet.

Each scheduler knows the slices that are leased to it as replicas of its own: a part of an engine's batch, of
its KV cache, and of the places in its queue. At each renewal leases follow the demand. A slice that changes
hands is lost to its old scheduler, whose requests run on, and joins the new one with what they leave free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from experiments.several_schedulers.leases import scheduler_of, share_leases
from serve_app.engine_model.model import StepOutcome
from serve_app.engine_model.sequences import EngineSequence, SequenceState
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.routing.replica import ReplicaSpec
from serve_app.scheduling import Scheduler, SchedulerSettings
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Command, Conclude, Dispatch
from serve_app.simulation.replica import ReplicaPlan, SimulatedReplica
from serve_app.simulation.simulation import SimulatedRequest
from serve_app.simulation.timeline import Rank, Timeline

_LATENCY_S = 0.001
_REPORT_INTERVAL_S = 0.2


@dataclass(slots=True, eq=False)
class Slice:
    """A part of a replica that is leased as a whole.

    Attributes:
        spec: all of it, as a replica of a scheduler.
        running: what runs in it, for whichever scheduler, by request.
        lessee: the scheduler that may use it.
        received: requests sent to it since its lessee has it.
        offered: the limits that its lessee knows; None while nothing of it is free.
    """

    spec: ReplicaSpec
    replica: SimulatedReplica
    running: dict[str, "SharedRequest"] = field(default_factory=dict)
    lessee: int = -1
    received: int = 0
    offered: ReplicaSpec | None = None

    def free(self) -> ReplicaSpec | None:
        """Its limits, less what other schedulers still run in it."""
        others = [one for one in self.running.values() if one.scheduler != self.lessee]
        assert self.spec.max_num_seqs is not None
        assert self.spec.kv_tokens is not None
        places = self.spec.max_num_seqs - len(others)
        tokens = self.spec.kv_tokens - sum(one.tokens for one in others)
        # A replica may always be sent one request of full length, so less than that is no offer.
        if places < 1 or tokens < self.spec.max_model_len:
            return None
        return replace(self.spec, max_num_seqs=places, kv_tokens=tokens)


@dataclass(slots=True, eq=False)
class SharedRequest:
    """A request, its scheduler, and what has happened to it.

    Attributes:
        tokens: as its scheduler expects it to hold of a KV cache.
        dispatched_at: seconds; None while it waits.
    """

    simulated: SimulatedRequest
    scheduler: int
    tokens: int = 0
    dispatched_at: float | None = None
    within: Slice | None = None
    sequence: EngineSequence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How schedulers share a fleet.

    Attributes:
        slices_per_replica: 1 leases whole replicas.
        renew_s: between two renewals of the leases.
    """

    schedulers: int
    slices_per_replica: int
    renew_s: float = 1.0


class SharedFleet:
    """One run.

    Attributes:
        done: the requests that have ended, in that order.
        moved: slices that have changed hands.
        most_over: most requests in a slice beyond its batch and queue places; leases keep it at 0.
    """

    def __init__(self, settings: SchedulerSettings, plans: Sequence[ReplicaPlan], sharing: Sharing) -> None:
        self.timeline = Timeline()
        self.done: list[SharedRequest] = []
        self.moved = 0
        self.most_over = 0
        self._sharing = sharing
        self._target = settings.backpressure_in_force.target_waiting
        self._schedulers = [Scheduler(settings) for _ in range(sharing.schedulers)]
        self._wakes: list[float | None] = [None] * sharing.schedulers
        self._live: dict[str, SharedRequest] = {}
        self._left = 0
        self._slices: dict[str, Slice] = {}
        for plan in plans:
            replica = SimulatedReplica(plan, self.timeline, self._step_ended)
            for each in _slices(plan, replica, sharing.slices_per_replica):
                self._slices[each.spec.replica_id] = each

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Play all requests to their end."""
        self._left = len(requests)
        self._renew()
        for place, each in enumerate(self._slices.values()):
            first_s = _REPORT_INTERVAL_S * place / len(self._slices)
            self.timeline.at(first_s, Rank.REPORT, partial(self._report, each))
        for simulated in requests:
            self.timeline.at(simulated.request.arrived_at, Rank.ARRIVAL, partial(self._arrive, simulated))
        self.timeline.run()

    # Leases

    def _renew(self) -> None:
        """Leases follow the demand; those with the least at work change hands first."""
        wanted = share_leases(self._demands(), len(self._slices))
        held = [0] * len(wanted)
        free: list[Slice] = []
        for each in sorted(self._slices.values(), key=lambda one: -len(one.running)):
            if each.lessee >= 0 and held[each.lessee] < wanted[each.lessee]:
                held[each.lessee] += 1
            else:
                free.append(each)
        # In turn, so that each scheduler has slices of different replicas.
        while free:
            for scheduler, count in enumerate(wanted):
                if held[scheduler] < count and free:
                    self._lease(free.pop(), scheduler)
                    held[scheduler] += 1
        for each in self._slices.values():
            self._offer(each)
        if self._left:
            self.timeline.at(self.timeline.now + self._sharing.renew_s, Rank.WAKE_UP, self._renew)

    def _demands(self) -> list[Mapping[str, float]]:
        places = sum(each.spec.max_num_seqs or 0 for each in self._slices.values())
        tokens = sum(each.spec.kv_tokens or 0 for each in self._slices.values())
        demands: list[dict[str, list[int]]] = [{} for _ in self._schedulers]
        for one in self._live.values():
            used = demands[one.scheduler].setdefault(one.simulated.request.tenant, [0, 0])
            used[0] += 1
            used[1] += one.tokens
        return [
            {tenant: max(count / places, held / tokens) for tenant, (count, held) in each.items()}
            for each in demands
        ]

    def _lease(self, each: Slice, scheduler: int) -> None:
        if each.lessee >= 0:
            self.moved += 1
            self._feed(each.lessee, ev.ReplicaLost(each.spec.replica_id))
        each.lessee, each.received, each.offered = scheduler, 0, None

    def _offer(self, each: Slice) -> None:
        offer = each.free()
        if offer == each.offered:
            return
        each.offered = offer
        if offer is None:
            self._feed(each.lessee, ev.ReplicaLost(each.spec.replica_id))
            return
        self._feed(each.lessee, ev.ReplicaJoined(offer))
        self._send_report(each)

    # The schedulers

    def _feed(self, scheduler: int, event: ev.Event) -> None:
        core = self._schedulers[scheduler]
        for command in core.handle(event, self.timeline.now):
            self._carry_out(command)
        wake_at, planned = core.next_wakeup(), self._wakes[scheduler]
        if wake_at is not None and self._left and (planned is None or wake_at < planned):
            self._wakes[scheduler] = wake_at
            at = max(wake_at, self.timeline.now)
            self.timeline.at(at, Rank.WAKE_UP, partial(self._wake, scheduler, wake_at))

    def _wake(self, scheduler: int, planned: float) -> None:
        if self._wakes[scheduler] == planned:
            self._wakes[scheduler] = None
            self._feed(scheduler, ev.Woke())

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Dispatch):
            one, each = self._live[command.request_id], self._slices[command.replica_id]
            one.within, one.dispatched_at = each, self.timeline.now
            each.running[command.request_id] = one
            each.received += 1
            over = len(each.running) - (each.spec.max_num_seqs or 0) - self._target
            self.most_over = max(self.most_over, over)
            self._later(partial(self._reach_engine, one))
        elif isinstance(command, Conclude):
            one = self._live.pop(command.request_id)
            if one.within is not None:
                del one.within.running[command.request_id]
            self._left -= 1
            self.done.append(one)

    def _later(self, action: partial[None], rank: Rank = Rank.FEEDBACK) -> None:
        self.timeline.at(self.timeline.now + _LATENCY_S, rank, action)

    # Requests and replicas

    def _arrive(self, simulated: SimulatedRequest) -> None:
        request = simulated.request
        scheduler = scheduler_of(request.tenant, len(self._schedulers))
        one = self._live[request.request_id] = SharedRequest(simulated, scheduler)
        self._feed(scheduler, ev.Arrived(request))
        scheduled = self._schedulers[scheduler].find(request.request_id)
        if scheduled is not None:
            one.tokens = scheduled.estimate.expected_tokens

    def _reach_engine(self, one: SharedRequest) -> None:
        request = one.simulated.request
        assert one.within is not None
        one.sequence = EngineSequence(
            request.request_id,
            request.shape.prompt_tokens or 1,
            one.simulated.output_tokens,
            self.timeline.now,
        )
        one.within.replica.accept(one.sequence)

    def _step_ended(self, outcome: StepOutcome) -> None:
        for sequence in outcome.first_tokens:
            scheduler = self._live[sequence.sequence_id].scheduler
            self._later(partial(self._feed, scheduler, ev.FirstToken(sequence.sequence_id)))
        for sequence in outcome.finished:
            usage = Usage(prompt_tokens=sequence.prompt_tokens, output_tokens=sequence.target_tokens)
            scheduler = self._live[sequence.sequence_id].scheduler
            finished = ev.Finished(sequence.sequence_id, Outcome.COMPLETED, usage)
            self._later(partial(self._feed, scheduler, finished))

    def _report(self, each: Slice) -> None:
        if each.offered is not None:
            self._send_report(each)
        if self._left:
            at = self.timeline.now + _REPORT_INTERVAL_S
            self.timeline.at(at, Rank.REPORT, partial(self._report, each))

    def _send_report(self, each: Slice) -> None:
        """What the engine says, of the requests of its lessee alone."""
        mine = [one for one in each.running.values() if one.scheduler == each.lessee]
        there = [one.sequence for one in mine if one.sequence is not None]
        waiting = sum(one.state in (SequenceState.NEW, SequenceState.WAITING) for one in there)
        on_their_way = len(mine) - len(there)
        report = replace(
            each.replica.report(),
            received=each.received - on_their_way,
            waiting=waiting,
            running=len(there) - waiting,
        )
        self._feed(each.lessee, ev.ReplicaReported(each.spec.replica_id, report))


def _slices(plan: ReplicaPlan, replica: SimulatedReplica, count: int) -> list[Slice]:
    """A replica cut into slices of its batch and its KV cache."""
    engine = plan.engine
    cut = replace(engine, max_num_seqs=engine.max_num_seqs // count, kv_tokens=engine.kv_tokens // count)
    return [
        Slice(replace(plan, replica_id=f"{plan.replica_id}/{number}", engine=cut).spec, replica)
        for number in range(count)
    ]
