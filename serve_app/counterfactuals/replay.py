"""The replay of a recording: its requests at their times, at the production scheduler, on simulated engines.

The scheduler begins with the settings, the length queues and the learned state of the recording. Answers have
the lengths that engines counted. Those that nobody counted have the expected length, as the scheduler saw it.
A client that went away goes away as long after its arrival as it did, unless its answer is complete by then.

Not replayed: limits of API keys, prefix affinity (what was cached counts as cached wherever a request goes),
requests that came back from replicas, and crashes of engines: a replica that leaves finishes what it has.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from serve_app.counterfactuals.recording import RecordedChange, RecordedRequest, Recording
from serve_app.errors import Outcome
from serve_app.metrics.targets import NOT_OURS
from serve_app.request import Request
from serve_app.routing.replica import ReplicaSpec
from serve_app.scheduling import events as ev
from serve_app.scheduling.learned_state import take_over
from serve_app.simulation.partitions import FixedPartition
from serve_app.simulation.replica import ReplicaPlan
from serve_app.simulation.simulation import SimulatedRequest, Simulation, SimulationSettings
from serve_app.simulation.timeline import Rank
from serve_app.tuning.online.twin_calibration import CalibrationSettings, TwinCalibration

_LEFT_OUT = NOT_OURS | {Outcome.REJECTED_NO_REPLICA, Outcome.REJECTED_STOPPING}
_GATEWAY = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReplica(ReplicaPlan):
    """A replica that states what the real one stated."""

    stated: ReplicaSpec

    @property
    def spec(self) -> ReplicaSpec:
        """As the real one registered."""
        return self.stated


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a request in a replay.

    Attributes:
        wait_s: in the queue; to its end, when it was never sent.
        ttft_s: None when it had no first token, or its answer is not streamed.
    """

    wait_s: float
    ttft_s: float | None
    outcome: Outcome


def is_played(request: RecordedRequest) -> bool:
    """Whether a replay has the request: not when it was refused for what it is."""
    return request.outcome not in _LEFT_OUT


def replay_recording(
    recording: Recording, step_times: Mapping[str, Mapping[str, float]]
) -> dict[str, Played]:
    """What became of each request that is played, by its id.

    Args:
        step_times: of the engines, as in a recording.

    Raises:
        ValueError: the step times, or what was learned, are broken.
    """
    return _Replay(recording, step_times).run()


class _Replay:
    def __init__(self, recording: Recording, step_times: Mapping[str, Mapping[str, float]]) -> None:
        self._recording = recording
        self._calibration = TwinCalibration(CalibrationSettings(), None)
        self._calibration.restore(step_times)
        # The simulator's clock begins at 0, with what was under way already.
        self._offset_s = -min([0.0, *(each.arrived_s for each in recording.requests)])
        learner = None if recording.partition is None else FixedPartition(recording.partition).learner()
        self._simulation = Simulation(
            recording.settings,
            self._plans(recording.fleet),
            SimulationSettings(control_latency_s=self._calibration.latency_s),
            learner=learner,
        )

    def run(self) -> dict[str, Played]:
        recording, simulation = self._recording, self._simulation
        take_over(simulation.scheduler, recording.learned, 0.0)
        for tokens in recording.earlier_prompt_tokens:
            simulation.scheduler.isolation.observe(tokens)
        for change in recording.changes:
            simulation.timeline.at(change.at_s + self._offset_s, Rank.REPORT, partial(self._change, change))
        played = [each for each in recording.requests if is_played(each)]
        for each in played:
            if each.outcome is Outcome.CANCELLED and each.ended_s is not None:
                gone = partial(simulation.cancel, each.request_id)
                simulation.timeline.at(each.ended_s + self._offset_s, Rank.ARRIVAL, gone)
        streamed = {each.request_id for each in played if each.submission.spec.streamed}
        records = simulation.run([self._simulated(each) for each in played])
        return {
            record.request_id: Played(
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
                tells_load=spec.max_num_seqs is not None,
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
            # Choices run beside each other.
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
