"""Replay of a recording: its requests at their times, on the production scheduler with simulated engines.

The scheduler begins with the settings, the length queues and the learned state of the recording. Responses
have the lengths that engines counted or, without a count, the expected length as the scheduler saw it. A
client that disconnected does so again after the same time, unless its response is complete by then.

Not replayed: limits of API keys, prefix affinity (cached tokens count as cached on any replica), put-backs,
and engine crashes: a replica that leaves completes its requests.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from serve_app.core import events as ev
from serve_app.core.learned_state import restore_state
from serve_app.core.metrics.targets import NOT_ATTRIBUTABLE
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.errors import Outcome
from serve_app.lab.simulation.partitions import FixedPartition
from serve_app.lab.simulation.simulation import (
    Phase,
    ReplicaPlan,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
)
from serve_app.request import PriorityClass, Request
from serve_app.tuning.counterfactuals.recording import RecordedChange, RecordedRequest, Recording
from serve_app.tuning.engine_fit import Engines
from serve_app.tuning.twin_calibration import CalibrationSettings, TwinCalibration

_NOT_REPLAYED = NOT_ATTRIBUTABLE | {Outcome.REJECTED_NO_REPLICA, Outcome.REJECTED_STOPPING}
_GATEWAY = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReplica(ReplicaPlan):
    """A replica that reports what the real one reported."""

    stated: ReplicaSpec

    @property
    def spec(self) -> ReplicaSpec:
        """The registration of the real replica."""
        return self.stated


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """Result of a request in a replay.

    Attributes:
        wait_s: queue time; up to its end if it was never dispatched.
        ttft_s: None if it had no first token, or its response is not streamed.
    """

    wait_s: float
    ttft_s: float | None
    outcome: Outcome


def is_replayed(request: RecordedRequest) -> bool:
    """Return whether a replay includes the request: not after a client error or without a replica."""
    return request.outcome not in _NOT_REPLAYED


def replay_recording(recording: Recording, engines: Engines) -> dict[str, ReplayedRequest]:
    """Return the result of each played request by id.

    Raises:
        ValueError: the learned state is invalid.
    """
    return _Replay(recording, engines).run()


class _Replay:
    def __init__(self, recording: Recording, engines: Engines) -> None:
        self._recording = recording
        self._calibration = TwinCalibration(CalibrationSettings(), None, engines)
        # The simulator's clock begins at 0, including what was already in progress.
        self._offset_s = -min([0.0, *(each.arrived_s for each in recording.requests)])
        learner = None if recording.partition is None else FixedPartition(recording.partition).learner()
        self._simulation = Simulation(
            recording.settings,
            self._plans(recording.fleet),
            SimulationSettings(control_latency_s=self._calibration.latency_s),
            learner=learner,
        )

    def run(self) -> dict[str, ReplayedRequest]:
        recording, simulation = self._recording, self._simulation
        restore_state(simulation.scheduler, recording.learned)
        for tokens in recording.earlier_prompt_tokens:
            simulation.scheduler.isolation.observe(tokens)
        for change in recording.changes:
            simulation.timeline.schedule(
                change.at_s + self._offset_s, Phase.REPORT, partial(self._change, change)
            )
        played = [each for each in recording.requests if is_replayed(each)]
        for each in played:
            if each.outcome is Outcome.CANCELLED and each.ended_s is not None:
                gone = partial(simulation.cancel, each.request_id)
                simulation.timeline.schedule(each.ended_s + self._offset_s, Phase.ARRIVAL, gone)
        streamed = {each.request_id for each in played if each.submission.spec.streamed}
        records = simulation.run([self._simulated(each) for each in played])
        return {
            record.request_id: ReplayedRequest(
                record.e2e_s if record.queue_wait_s is None else record.queue_wait_s,
                record.ttft_s if record.request_id in streamed else None,
                record.outcome,
            )
            for record in records
        }

    def _plans(self, fleet: tuple[ReplicaSpec, ...]) -> list[RecordedReplica]:
        plans = self._calibration.engines(fleet) or ()
        return [
            RecordedReplica(
                replica_id=plan.replica_id,
                pool=plan.pool,
                engine=plan.engine,
                step_time=plan.step_time,
                reports_load=spec.max_num_seqs is not None,
                stated=spec,
            )
            for plan, spec in zip(plans, fleet, strict=True)
        ]

    def _simulated(self, recorded: RecordedRequest) -> SimulatedRequest:
        arrived_at = recorded.arrived_s + self._offset_s
        expires_after_s = math.inf if recorded.expires_after_s is None else recorded.expires_after_s
        usage, choices = recorded.usage, max(1, recorded.submission.spec.choices)
        output = recorded.expected_output_tokens if usage is None else usage.output_tokens
        return SimulatedRequest(
            Request(
                submission=recorded.submission,
                gateway_id=_GATEWAY,
                arrived_at=arrived_at,
                expires_at=arrived_at + expires_after_s,
            ),
            # Choices run in parallel.
            output_tokens=math.ceil(output / choices),
            prompt_tokens=recorded.prompt_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
        )

    def _change(self, change: RecordedChange) -> None:
        simulation = self._simulation
        if change.joined is not None:
            simulation.join(self._plans((change.joined,))[0])
        elif change.left is not None:
            replica = simulation.replicas.get(change.left)
            if replica is not None:
                replica.draining = True
                simulation.feed(ev.ReplicaReported(change.left, replica.report()))
        elif change.partition is not None:
            simulation.feed(ev.PartitionChanged(change.partition))
        elif change.settings is not None:
            settings = replace(change.settings, policy=self._recording.settings.policy)
            simulation.feed(ev.Retuned(settings))


COMPARED_POLICIES = ("ewsjf", "fcfs", "sjf", "hrrn", "wspt-drr", "two-queue")
"""Policies of `core.policies` that are not variants of another one."""

POLICY = "policy"
"""Kind of a change to another policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRecording:
    """A recording with one difference.

    Attributes:
        kind: class, replica, policy, long_prefills, tenant or own_requests.
        value: the class, pool, policy or tenant.
        label: description for a person.
        omitted: client ids of the omitted requests.
        example: the scheduler's id of one of them; empty if there are none.
    """

    kind: str
    value: str
    label: str
    recording: Recording
    omitted: tuple[str, ...] = ()
    example: str = ""


def all_changes(recording: Recording) -> Iterator[ChangedRecording]:
    """Yield every change that makes sense for the request."""
    for priority in PriorityClass:
        if priority is not recording.subject.submission.priority:
            yield with_class(recording, priority)
    if recording.fleet:
        yield with_replica(recording)
    for policy in COMPARED_POLICIES:
        if policy != recording.settings.policy:
            yield with_policy(recording, policy)
    yield from _without_others(recording)


def with_class(recording: Recording, priority: PriorityClass) -> ChangedRecording:
    """Return the change to another class, with the queue timeout of that class."""
    subject = recording.subject
    submission = replace(subject.submission, priority=priority)
    expires_after_s = subject.expires_after_s
    if submission.queue_timeout_s is None:
        expires_after_s = recording.settings.queue_timeout_s.of(priority)
    changed = replace(subject, submission=submission, expires_after_s=expires_after_s)
    requests = tuple(changed if each is subject else each for each in recording.requests)
    return ChangedRecording(
        kind="class",
        value=priority.value,
        label=f"as {priority.value}",
        recording=replace(recording, requests=requests),
    )


def with_replica(recording: Recording) -> ChangedRecording:
    """Return the change to one more replica from the start, in the pool that served the request."""
    pool = pool_of(recording)
    alike = next((each for each in recording.fleet if each.pool == pool), recording.fleet[0])
    more = replace(alike, replica_id=f"{alike.pool}+1")
    return ChangedRecording(
        kind="replica",
        value=alike.pool,
        label=f"one more replica in pool {alike.pool}",
        recording=replace(recording, fleet=(*recording.fleet, more)),
    )


def with_policy(recording: Recording, policy: str) -> ChangedRecording:
    """Return the change to another policy for all requests."""
    settings = replace(recording.settings, policy=policy)
    return ChangedRecording(
        kind=POLICY, value=policy, label=f"policy {policy}", recording=replace(recording, settings=settings)
    )


def pool_of(recording: Recording) -> str:
    """Return the pool that served the request, or the pool of most requests if there was none."""
    if recording.subject.pool:
        return recording.subject.pool
    pools = Counter(each.pool for each in recording.requests if each.pool)
    return pools.most_common(1)[0][0] if pools else recording.fleet[0].pool


def _without_others(recording: Recording) -> Iterator[ChangedRecording]:
    subject = recording.subject
    concurrent = [
        each
        for each in recording.requests
        if each is not subject and is_replayed(each) and overlaps(each, subject)
    ]
    long = [each for each in concurrent if each.prompt_tokens > recording.long_prompt_tokens]
    if long:
        yield without(
            recording, long, "long_prefills", f"without {_counted(len(long), 'concurrent long prefill')}"
        )
    tenant = subject.submission.tenant
    others: Counter[str] = Counter()
    for each in concurrent:
        if each.submission.tenant != tenant:
            others[each.submission.tenant] += each.prompt_tokens + each.expected_output_tokens
    if others:
        most = others.most_common(1)[0][0]
        of_tenant = [each for each in concurrent if each.submission.tenant == most]
        yield without(
            recording, of_tenant, "tenant", f"without {_counted(len(of_tenant), 'request')} of tenant {most}"
        )
        own = [each for each in concurrent if each.submission.tenant == tenant]
        if own:
            yield without(
                recording, own, "own_requests", f"without {_counted(len(own), 'other request')} of its tenant"
            )


def _counted(count: int, one: str) -> str:
    return f"the {one}" if count == 1 else f"the {count:,} {one}s"


def without(recording: Recording, others: list[RecordedRequest], kind: str, label: str) -> ChangedRecording:
    """Return the change without some requests."""
    gone = {each.request_id for each in others}
    kept = tuple(each for each in recording.requests if each.request_id not in gone)
    return ChangedRecording(
        kind=kind,
        value=others[0].submission.tenant if kind == "tenant" else "",
        label=label,
        recording=replace(recording, requests=kept),
        omitted=tuple(each.client_id for each in others),
        example=others[0].request_id,
    )


def overlaps(other: RecordedRequest, subject: RecordedRequest) -> bool:
    """Return whether the other request waited or ran while this one waited."""
    until = subject.arrived_s + (subject.wait_s or 0.0)
    return other.arrived_s < until and (other.ended_s is None or other.ended_s > subject.arrived_s)
