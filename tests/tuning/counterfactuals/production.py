"""Simulated production with the live scheduler's receipts, so that waits are known exactly."""

import asyncio
import random
from dataclasses import dataclass, replace

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.decision_log import Decision
from serve_app.core.events import Arrived, Finished
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.engines.model.sequences import EngineModelSettings
from serve_app.lab.calibration.fit import FittedEngine
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation
from serve_app.request import PriorityClass, PromptShape, Request, RequestSpec, Submission
from serve_app.serving.channel.request_book import GatewayRequest, GatewaySession
from serve_app.serving.channel.scheduler_client import RequestTimes
from serve_app.serving.process import run_in_parts
from serve_app.serving.scheduler.history import RequestHistory
from serve_app.serving.scheduler.journal import Entry
from serve_app.serving.scheduler.recordings import RecordedSurroundings, StepTimes, TrafficRecorder
from serve_app.tuning.counterfactuals.recording import Recording, decode_recording, encode_recording
from serve_app.tuning.engine_fit import engines_as_json
from tests.lab.simulation.builders import STEP_TIME

ENGINE = EngineModelSettings(
    max_model_len=4_096, kv_tokens=12_288, max_num_seqs=4, max_num_batched_tokens=512
)
ENGINES = {"only": FittedEngine(step_time=STEP_TIME, latency_s=0.002)}
STEP_TIMES = StepTimes(engines_as_json(ENGINES), "those of the profile")
FLEET = "only-0", "only-1"
CLASSES = tuple(PriorityClass)


def plan(replica_id: str) -> ReplicaPlan:
    return ReplicaPlan(replica_id=replica_id, pool="only", engine=ENGINE, step_time=STEP_TIME)


def settings(policy: str = "ewsjf") -> SchedulerSettings:
    return SchedulerSettings(model="m", policy=policy, routing=RoutingSettings(pools=("only",)))


def burst(count: int, seed: int, *, rate_per_s: float = 6.0, streamed: bool = True) -> list[SimulatedRequest]:
    """Return an overload for two replicas: three classes and tenants, one prompt in six is long."""
    rng, now, requests = random.Random(seed), 0.0, []
    for number in range(count):
        prompt = rng.randint(1_500, 3_000) if rng.random() < 1 / 6 else rng.randint(20, 300)
        shape = PromptShape(text_bytes=round(prompt * rng.uniform(3.5, 5.0)), messages=1)
        submission = Submission(
            request_id=f"r{number}",
            spec=RequestSpec(model="m", shape=shape, streamed=streamed or number % 2 == 0),
            tenant=f"tenant-{rng.randrange(3)}",
            priority=CLASSES[rng.randrange(3)],
        )
        request = Request(
            submission=submission, gateway_id="replay", arrived_at=now, expires_at=now + 43_200.0
        )
        requests.append(SimulatedRequest(request, output_tokens=rng.randint(20, 120), prompt_tokens=prompt))
        now += rng.expovariate(rate_per_s)
    return requests


@dataclass
class Production:
    """One run and its recordings."""

    simulation: Simulation
    records: dict[str, RequestRecord]
    recorder: TrafficRecorder

    def recording(self, request_id: str) -> Recording:
        """Return the recording as a client decodes it."""
        looking = self.recorder.recording(request_id, STEP_TIMES, self.simulation.timeline.now)
        made = asyncio.run(run_in_parts(looking))
        assert made is not None
        return decode_recording(encode_recording(made))

    def wait_s(self, request_id: str) -> float:
        wait_s = self.records[request_id].queue_wait_s
        assert wait_s is not None
        return wait_s


def produce(
    requests: list[SimulatedRequest], *, policy: str = "ewsjf", fleet: tuple[str, ...] = FLEET
) -> Production:
    """Simulate these requests as production, with receipts."""
    session, records = GatewaySession("g1"), dict[str, GatewayRequest]()
    plans = [plan(name) for name in fleet]
    simulation = Simulation(settings(policy), ())
    history = RequestHistory(lambda _pool, tokens: tokens / 10_000)
    surroundings = RecordedSurroundings(simulation.scheduler, 900.0)

    def keep(decision: Decision) -> None:
        event, core = decision.event, simulation.scheduler
        entry = Entry(core, decision.now, event, list(decision.commands))
        if isinstance(event, Arrived):
            request = event.request
            name = request.request_id
            record = records[name] = GatewayRequest(session, request.submission, 0, f"client-{name}")
            record.arrived_at = request.arrived_at
            entry.gateway_request, entry.scheduled = record, core.find(name)
        for command in decision.commands:
            if isinstance(command, Dispatch):
                scheduled = core.find(command.request_id)
                assert scheduled is not None
                entry.dispatched.append((command, scheduled))
            elif isinstance(command, Conclude):
                record = records.pop(command.request_id)
                if isinstance(event, Finished):
                    record.usage = event.usage
                    record.times = _times(simulation, command.request_id, decision.now)
                entry.concluded.append((command, record))
        surroundings.on_entry(entry)
        history.on_entry(entry)

    simulation.on_decision = keep
    for number, each in enumerate(plans):
        simulation.join(each, simulation.settings.report_interval_s * number / len(plans))
    ended = simulation.run(requests)
    recorder = TrafficRecorder(simulation.scheduler, history, surroundings)
    return Production(simulation, {each.request_id: each for each in ended}, recorder)


def _times(simulation: Simulation, request_id: str, now: float) -> RequestTimes:
    simulated = simulation.in_progress(request_id)
    sequence, sent_at = simulated.sequence, simulated.dispatched_at
    assert sequence is not None
    assert sent_at is not None
    first_at = sequence.first_token_at if simulated.request.spec.streamed else None
    first_token_s = None if first_at is None else first_at - sent_at
    return RequestTimes("/v1/x", 0.0, 0.0, first_token_s, now - sent_at)


def with_priority(
    requests: list[SimulatedRequest], request_id: str, priority: PriorityClass
) -> list[SimulatedRequest]:
    """Return the same requests, one of them in another class."""
    found = []
    for each in requests:
        request = each.request
        if request.request_id == request_id:
            request = replace(request, submission=replace(request.submission, priority=priority))
        found.append(SimulatedRequest(request, each.output_tokens, prompt_tokens=each.prompt_tokens))
    return found
