"""Simulation of the production scheduler on simulated replicas: requests in, decisions and records out.

- `Simulation`: messages take `control_latency_s`: a grant to its engine, and feedback or a report to the
  scheduler. A replica reports every `report_interval_s`. Requests reach the scheduler at the instant of their
  arrival. A learner, if there is one, observes each admitted request and answers immediately.
- `Timeline`: the event queue holds scheduled actions in a total order. Actions of one instant run by phase,
  then in the order in which they were scheduled, so a replay of a run is byte-identical.
- `PartitionSource`: a source of length queues: a learner, a file, or the prior. The learner itself is
  `serve_app.tuning.strategic_loop`; this module defines its interface for the simulation.
"""

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core import events as ev
from serve_app.core.commands import Conclude, Dispatch, Revoke
from serve_app.core.decision_log import Decision
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.policies import MakePolicy
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.routing.estimation.estimate import TokenEstimator
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.settings_base import NOT_NEGATIVE, POSITIVE, settings
from serve_app.engines.model.model import (
    EngineModel,
    EngineModelSettings,
    EngineSequence,
    RecentMean,
    StepOutcome,
)
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.vllm_scheduler import VllmModel
from serve_app.request import Request, TurnEnd, Usage

LEARNED = "learned"
PRIOR = "prior"


class PartitionLearner(Protocol):
    """Observer of the prompts that arrive, which occasionally changes the queues."""

    def observe(self, prompt_tokens: int) -> None:
        """Record a prompt that arrived, by its length as the scheduler estimates it."""
        ...

    def due(self, now: float) -> Partition | None:
        """Return the partition to apply now, or None for no change."""
        ...


class PartitionSource(Protocol):
    """Factory of learners, one per run; a plain value that can be sent to processes and into results."""

    def learner(self, policy: str) -> PartitionLearner:
        """Return a new learner for a policy, without observations."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPartition:
    """One partition for the whole run."""

    partition: Partition

    def learner(self, policy: str = "") -> PartitionLearner:  # noqa: ARG002 - the same for all policies
        """Return a learner that returns the partition at its first call."""
        return _FixedLearner(self.partition)


@dataclass(slots=True)
class _FixedLearner:
    partition: Partition | None

    def observe(self, prompt_tokens: int) -> None:
        """Ignore all prompts."""

    def due(self, now: float) -> Partition | None:  # noqa: ARG002 - due at the first call
        """Return the partition once."""
        partition, self.partition = self.partition, None
        return partition


def partition_source(text: str, learned: PartitionSource) -> PartitionSource | None:
    """Return the source that `--partition` names: `learned`, `prior` (None) or a file.

    Raises:
        SettingsError: the file does not contain a partition.
    """
    if text == LEARNED:
        return learned
    return None if text == PRIOR else FixedPartition(read_partition(Path(text)))


@settings
class _IntervalRow:
    """An interval in a file."""

    min: int
    max: int
    mean: float
    count: int = field(default=1)


_ROWS = TypeAdapter(list[_IntervalRow])


def read_partition(path: Path) -> Partition:
    """Read a YAML list of `{min, max, mean, count}`, in tokens, the shortest lengths first.

    Raises:
        SettingsError: the file cannot be read, or its intervals are not a valid partition.
    """
    try:
        rows = _ROWS.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
        return Partition(
            tuple(
                LengthInterval(min_tokens=row.min, max_tokens=row.max, mean_tokens=row.mean, count=row.count)
                for row in rows
            )
        )
    except (OSError, yaml.YAMLError, ValidationError, ValueError) as error:
        raise SettingsError(
            f"{path} is not a partition: {error}; use {LEARNED}, {PRIOR} or a file with a list of "
            "{min, max, mean, count}"
        ) from error


def write_partition(path: Path, partition: Partition) -> None:
    """Write a partition to a file, in the format of `read_partition`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = partition_as_json(partition)
    path.write_text(yaml.safe_dump(rows, sort_keys=False, default_flow_style=None), encoding="utf-8")


def partition_as_json(partition: Partition) -> list[dict[str, Any]]:
    """Return the intervals in plain values, named as in a file."""
    return [
        {
            "min": queue.min_tokens,
            "max": queue.max_tokens,
            "mean": queue.mean_tokens,
            "count": queue.count,
        }
        for queue in partition.intervals
    ]


class Phase(enum.IntEnum):
    """Order of actions in one instant.

    Engines are first, so that all others see their new state. Feedback from engines reaches the scheduler
    before arrivals do, so capacity that becomes free at the instant of an arrival is available to it. The
    scheduler's own wake-ups are last.
    """

    ENGINE = 0
    FEEDBACK = 1
    REPORT = 2
    ARRIVAL = 3
    WAKE_UP = 4


Action = Callable[[], None]
_Scheduled = tuple[float, int, int, Action]
"""Time, phase, order of scheduling, action."""


class Timeline:
    """Event queue: schedules actions and runs them in order of time; `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[_Scheduled] = []
        # Actions scheduled by `schedule_all`, last first.
        self._sorted: list[_Scheduled] = []
        self._sequence = itertools.count()

    def schedule(self, time: float, phase: Phase, action: Action) -> None:
        """Schedule `action` for `time`.

        Raises:
            ValueError: `time` has passed.
        """
        if time < self.now:
            raise ValueError(f"cannot schedule an event at {time!r}: the time is already {self.now!r}")
        heapq.heappush(self._heap, (time, phase, next(self._sequence), action))

    def schedule_all(self, phase: Phase, actions: Iterable[tuple[float, Action]]) -> None:
        """Schedule many actions, each for its own time, equivalent to successive calls of `schedule`.

        They are sorted once and stored outside the heap, so that the heap remains small and fast for all
        other actions.

        Raises:
            ValueError: one of the times has passed.
        """
        scheduled: list[_Scheduled] = [
            (time, phase, next(self._sequence), action) for time, action in actions
        ]
        first = min((each[0] for each in scheduled), default=self.now)
        if first < self.now:
            raise ValueError(f"cannot schedule an event at {first!r}: the time is already {self.now!r}")
        self._sorted = sorted(self._sorted + scheduled, reverse=True)

    def run(self) -> None:
        """Run all scheduled actions, including newly scheduled ones."""
        heap = self._heap
        while heap or self._sorted:
            # Read again each time, because an action may schedule more.
            ordered = self._sorted
            from_sorted = bool(ordered) and not (heap and heap[0] < ordered[-1])
            self.now, _, _, action = ordered.pop() if from_sorted else heapq.heappop(heap)
            action()

    def __len__(self) -> int:
        return len(self._heap) + len(self._sorted)

    def __repr__(self) -> str:
        return f"<Timeline now={self.now:.6f} scheduled={len(self)}>"


# Decoding iterations that one event may cover. The model ends a step at any change.
_MAX_STEPS = 1_000_000


class EngineKind(enum.StrEnum):
    """Implementation of the simulated engines' scheduling.

    - MODEL: the engine model.
    - VLLM, VLLM_ASYNC: the installed vLLM's own scheduler, synchronous or asynchronous.
    """

    MODEL = "model"
    VLLM = "vllm"
    VLLM_ASYNC = "vllm-async"

    def create(self, settings: EngineModelSettings, step_time: StepTimeModel) -> EngineModel | VllmModel:
        """Return an engine without requests."""
        if self is EngineKind.MODEL:
            return EngineModel(settings, step_time)
        return VllmModel(settings, step_time, asynchronous=self is EngineKind.VLLM_ASYNC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """A replica to simulate.

    Attributes:
        kind: implementation of its scheduling.
        reports_load: whether it reports waiting and running requests, its batch size and its KV cache;
            otherwise it is like a server without metrics.
    """

    replica_id: str
    pool: str
    engine: EngineModelSettings
    step_time: StepTimeModel
    kind: EngineKind = EngineKind.MODEL
    reports_load: bool = True

    @property
    def spec(self) -> ReplicaSpec:
        """The replica's registration."""
        if not self.reports_load:
            return ReplicaSpec(
                replica_id=self.replica_id,
                pool=self.pool,
                max_model_len=self.engine.max_model_len,
                kv_tokens=None,
                max_num_seqs=None,
            )
        return ReplicaSpec(
            replica_id=self.replica_id,
            pool=self.pool,
            max_model_len=self.engine.max_model_len,
            kv_tokens=self.engine.kv_blocks * self.engine.block_size,
            max_num_seqs=self.engine.max_num_seqs,
            tpot_s=self.step_time.step_s(sequences=self.engine.max_num_seqs),
            prefill_token_s=self.step_time.prefill_per_token_s,
            max_num_batched_tokens=self.engine.max_num_batched_tokens,
            long_prefill_token_threshold=self.engine.long_prefill_token_threshold,
        )


class SimulatedReplica:
    """Driver of one engine model: begins a step if there is work, and reports the outcome of each step.

    Attributes:
        prefilled_tokens: prompt tokens computed so far, including those of preempted sequences.
    """

    def __init__(
        self,
        plan: ReplicaPlan,
        timeline: Timeline,
        on_outcome: Callable[[StepOutcome], None],
    ) -> None:
        self.spec = plan.spec
        self.model = plan.kind.create(plan.engine, plan.step_time)
        self.draining = False
        self.prefilled_tokens = 0
        self._reports_load = plan.reports_load
        self._timeline = timeline
        self._on_outcome = on_outcome
        self._received = 0
        self._tpot = RecentMean()
        self._tpot.record(0.0, 0, timeline.now)
        # The scheduled end of the current step. If the model has another end, the step was cut short.
        self._scheduled_end: float | None = None

    def accept(self, sequence: EngineSequence) -> None:
        """Add a request that has reached the engine."""
        self._received += 1
        self.model.add(sequence, self._timeline.now)
        self._advance()

    def abort(self, sequence: EngineSequence) -> None:
        """Abort a request."""
        self.model.abort(sequence, self._timeline.now)
        self._advance()

    def report(self) -> ReplicaReport:
        """Return the current load report."""
        if not self._reports_load:
            return ReplicaReport(
                received=None, waiting=None, running=None, kv_usage_ratio=None, draining=self.draining
            )
        snapshot = self.model.snapshot(self._timeline.now)
        self._tpot.record(snapshot.token_gaps_s, snapshot.token_gaps, self._timeline.now)
        return ReplicaReport(
            received=self._received,
            waiting=snapshot.waiting,
            running=snapshot.running,
            kv_usage_ratio=snapshot.kv_usage_ratio,
            tpot_s=self._tpot.mean(self._timeline.now),
            draining=self.draining,
        )

    def _advance(self) -> None:
        now = self._timeline.now
        ends_at = self.model.ends_at
        if ends_at is None:
            ends_at = self.model.begin_step(now, max_steps=_MAX_STEPS)
        if ends_at is not None and ends_at != self._scheduled_end:
            self._scheduled_end = ends_at
            self._timeline.schedule(max(ends_at, now), Phase.ENGINE, lambda: self._step_ends(ends_at))

    def _step_ends(self, scheduled: float) -> None:
        if scheduled != self._scheduled_end:
            return
        self._scheduled_end = None
        outcome = self.model.end_step()
        self.prefilled_tokens += outcome.prefill_tokens
        self._on_outcome(outcome)
        self._advance()


@settings
class SimulationSettings:
    """Environment of the scheduler.

    Attributes:
        control_latency_s: one-way latency between the scheduler and an engine, through a gateway.
        report_interval_s: time between two reports of a replica.
    """

    control_latency_s: Annotated[float, NOT_NEGATIVE] = 0.001
    report_interval_s: Annotated[float, POSITIVE] = 0.2


@dataclass(slots=True)
class SimulatedRequest:
    """A request with its true output length, and its progress.

    Attributes:
        ending: how its answer ends; None if that is unknown.
        revocations: number of attempts that were revoked.
        generated_tokens: output tokens of these attempts.
        computed_tokens: prompt and output tokens that were computed before the last revocation.
        recomputed_tokens: how many of these were computed again afterwards.
    """

    request: Request
    output_tokens: int
    block_hashes: Sequence[int] = ()
    ending: TurnEnd | None = None
    dispatch: Dispatch | None = None
    dispatched_at: float | None = None
    sequence: EngineSequence | None = None
    revocations: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    first_token_at: float | None = None

    def count_recomputed(self) -> None:
        """Count what the attempt that ends now has computed again."""
        if self.computed_tokens and (sequence := self.sequence) is not None and sequence.first_token_at:
            again = min(self.computed_tokens, sequence.prompt_tokens) - sequence.cached_tokens
            self.recomputed_tokens += max(0, again)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        known = self.request.shape.prompt_tokens
        assert known is not None, "a simulated request needs prompt_tokens"
        return known


OnEnd = Callable[[SimulatedRequest, RequestRecord], object]


@dataclass(slots=True)
class Simulation:
    """A simulated run.

    Attributes:
        records: one per concluded request, in the order of conclusion.
        on_decision: called with every decision; None records nothing, which is faster.
        learner: learner of length queues; None for the policy's initial ones.
        estimator: replaces the one that the settings describe.
        policies: the policies that the settings may name.
        partitions: every partition that was applied, with its time.
        on_end: called at the end of each request, with its record.
    """

    scheduler_settings: SchedulerSettings
    plans: Sequence[ReplicaPlan]
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    on_decision: Callable[[Decision], None] | None = None
    learner: PartitionLearner | None = None
    estimator: TokenEstimator | None = None
    policies: Mapping[str, MakePolicy] = field(default_factory=lambda: SIMULATED_POLICIES)
    on_end: OnEnd = lambda _simulated, _record: None
    timeline: Timeline = field(init=False, default_factory=Timeline)
    scheduler: Scheduler = field(init=False)
    replicas: dict[str, SimulatedReplica] = field(init=False, default_factory=dict)
    records: list[RequestRecord] = field(init=False, default_factory=list)
    partitions: list[tuple[float, Partition]] = field(init=False, default_factory=list)
    _live: dict[str, SimulatedRequest] = field(init=False, default_factory=dict)
    _pending_arrivals: int = field(init=False, default=0)
    _wake_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.scheduler_settings, policies=self.policies, estimator=self.estimator)
        self._apply_due_partition()
        for number, plan in enumerate(self.plans):
            # Real replicas do not report simultaneously either.
            self.join(plan, self.settings.report_interval_s * number / len(self.plans))

    def run(self, requests: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Run all requests to completion and return their records."""
        self._pending_arrivals += len(requests)
        arrivals = ((each.request.arrived_at, partial(self._arrive, each)) for each in requests)
        self.timeline.schedule_all(Phase.ARRIVAL, arrivals)
        self.timeline.run()
        return self.records

    def submit(self, simulated: SimulatedRequest) -> None:
        """Add a request during the run, such as a retry, which arrives at its `arrived_at`."""
        self._pending_arrivals += 1
        at = simulated.request.arrived_at
        self.timeline.schedule(at, Phase.ARRIVAL, partial(self._arrive, simulated))

    @property
    def is_over(self) -> bool:
        """True if the last request has ended."""
        return not self._pending_arrivals and not self._live

    # The scheduler

    def feed(self, event: ev.Event) -> None:
        """Pass an event to the scheduler now, and execute its commands."""
        now = self.timeline.now
        commands = self.scheduler.handle(event, now)
        if self.on_decision is not None:
            self.on_decision(Decision(now, event, tuple(commands)))
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatch(command)
            elif isinstance(command, Revoke):
                self._after_latency(Phase.FEEDBACK, partial(self._revoke, command))
            elif isinstance(command, Conclude):
                self._conclude(command)
        self._schedule_wake_up()

    def _schedule_wake_up(self) -> None:
        wake_at = self.scheduler.next_wakeup()
        # The simulation ends with its last request, because reports would continue forever.
        if wake_at is None or self.is_over or (self._wake_at is not None and self._wake_at <= wake_at):
            return
        self._wake_at = wake_at
        self.timeline.schedule(max(wake_at, self.timeline.now), Phase.WAKE_UP, lambda: self._wake_up(wake_at))

    def _wake_up(self, scheduled: float) -> None:
        if scheduled == self._wake_at:
            self._wake_at = None
            self.feed(ev.Woke())

    def _after_latency(self, phase: Phase, action: Callable[[], None]) -> None:
        self.timeline.schedule(self.timeline.now + self.settings.control_latency_s, phase, action)

    # Requests

    def _arrive(self, simulated: SimulatedRequest) -> None:
        self._pending_arrivals -= 1
        self._live[simulated.request.request_id] = simulated
        self.feed(ev.Arrived(simulated.request))
        if self.learner is not None:
            scheduled = self.scheduler.find(simulated.request.request_id)
            if scheduled is not None:
                self.learner.observe(scheduled.prefill_tokens)
            self._apply_due_partition()

    def _apply_due_partition(self) -> None:
        partition = self.learner.due(self.timeline.now) if self.learner is not None else None
        if partition is not None:
            self.partitions.append((self.timeline.now, partition))
            self.feed(ev.PartitionChanged(partition))

    def _dispatch(self, command: Dispatch) -> None:
        simulated = self._live[command.request_id]
        simulated.dispatch, simulated.dispatched_at = command, self.timeline.now
        self._after_latency(
            Phase.FEEDBACK, lambda: self._reach_engine(simulated, self.replicas[command.replica_id])
        )

    def _reach_engine(self, simulated: SimulatedRequest, replica: SimulatedReplica) -> None:
        request, dispatch = simulated.request, simulated.dispatch
        prompt_tokens = simulated.prompt_tokens
        assert dispatch is not None
        if replica.draining:
            self._put_back(request, replica, ev.DispatchFailure.UNREACHABLE)
            return
        if prompt_tokens + simulated.output_tokens > replica.spec.max_model_len:
            self._put_back(request, replica, ev.DispatchFailure.TOO_LONG)
            return
        simulated.sequence = EngineSequence(
            request.request_id,
            prompt_tokens + simulated.generated_tokens,
            simulated.output_tokens - simulated.generated_tokens,
            self.timeline.now,
            priority=dispatch.engine_priority or 0,
            block_hashes=simulated.block_hashes,
        )
        replica.accept(simulated.sequence)

    def _revoke(self, command: Revoke) -> None:
        """Stop a request as its gateway would, and put it back with what it has generated."""
        simulated = self._live.get(command.request_id)
        if simulated is None or simulated.sequence is None or simulated.sequence.finished_at is not None:
            return
        replica, sequence = self.replicas[command.replica_id], simulated.sequence
        replica.abort(sequence)
        # The last token is generated again, so that the request ends on an engine.
        generated = min(sequence.output_tokens, sequence.target_tokens - 1)
        if generated:
            simulated.generated_tokens += generated
            simulated.first_token_at = simulated.first_token_at or sequence.first_token_at
        simulated.count_recomputed()
        simulated.revocations += 1
        if sequence.first_token_at is not None:
            simulated.computed_tokens = sequence.prompt_tokens + generated
        simulated.sequence = None
        self._put_back(simulated.request, replica, ev.DispatchFailure.REVOKED)

    def _put_back(self, request: Request, replica: SimulatedReplica, failure: ev.DispatchFailure) -> None:
        generated = self._live[request.request_id].generated_tokens
        event = ev.DispatchFailed(
            request.request_id, replica.spec.replica_id, failure, generated_tokens=generated
        )
        self._after_latency(Phase.FEEDBACK, lambda: self.feed(event))

    def _conclude(self, command: Conclude) -> None:
        simulated = self._live.pop(command.request_id)
        request, sequence, dispatch = simulated.request, simulated.sequence, simulated.dispatch
        finished_at = sequence.finished_at if sequence is not None else None
        completed = command.conclusion.outcome is Outcome.COMPLETED
        record = RequestRecord(
            request_id=request.request_id,
            arrived_at=request.arrived_at,
            finished_at=self.timeline.now if finished_at is None else finished_at,
            outcome=command.conclusion.outcome,
            prompt_tokens=simulated.prompt_tokens,
            output_tokens=simulated.output_tokens if completed else 0,
            dispatched_at=simulated.dispatched_at,
            first_token_at=simulated.first_token_at
            or (sequence.first_token_at if sequence is not None else None),
            tenant=request.tenant,
            priority=request.priority,
            pool=dispatch.pool if dispatch else "",
            replica=dispatch.replica_id if dispatch else "",
            length_queue=dispatch.length_queue if dispatch else "",
            estimated_tokens=dispatch.estimated_tokens if dispatch else None,
            preemptions=sequence.preemptions if sequence is not None else 0,
            detail=command.conclusion.message,
        )
        self.records.append(record)
        self.on_end(simulated, record)

    # Replicas

    def join(self, plan: ReplicaPlan, report_after_s: float = 0.0) -> None:
        """Add a replica that is ready now."""
        replica = SimulatedReplica(plan, self.timeline, self._step_ended)
        self.replicas[plan.replica_id] = replica
        self.feed(ev.ReplicaJoined(replica.spec))
        first_at = self.timeline.now + report_after_s
        self.timeline.schedule(first_at, Phase.REPORT, partial(self._report, replica))

    def _step_ended(self, outcome: StepOutcome) -> None:
        for sequence in outcome.first_tokens:
            # A gateway sees the first token of a streamed response only.
            if self._live[sequence.sequence_id].request.spec.streamed:
                first = ev.FirstToken(sequence.sequence_id)
                self._after_latency(Phase.FEEDBACK, partial(self.feed, first))
        for sequence in outcome.finished:
            simulated = self._live[sequence.sequence_id]
            simulated.count_recomputed()
            usage = Usage(
                prompt_tokens=simulated.prompt_tokens,
                output_tokens=simulated.output_tokens,
                cached_tokens=sequence.cached_tokens,
                ending=simulated.ending,
            )
            finished = ev.Finished(sequence.sequence_id, Outcome.COMPLETED, usage)
            self._after_latency(Phase.FEEDBACK, partial(self.feed, finished))

    def _report(self, replica: SimulatedReplica) -> None:
        if self.replicas.get(replica.spec.replica_id) is not replica:
            return
        event = ev.ReplicaReported(replica.spec.replica_id, replica.report())
        self._after_latency(Phase.REPORT, lambda: self.feed(event))
        if not self.is_over or self.timeline.now == 0.0:
            at = self.timeline.now + self.settings.report_interval_s
            self.timeline.schedule(at, Phase.REPORT, partial(self._report, replica))
