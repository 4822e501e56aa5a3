"""Parity of the live and the simulated scheduler: the same object, with the same decisions.

One trace goes through both: the simulator, and the live scheduler of the scheduler actor with its gateway
sessions, messages and wake-ups, on an event loop whose clock jumps. Both use the same engine model. Every
decision is compared with its time, to the last bit.
"""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Command, Conclude
from serve_app.core.decision_log import Decision
from serve_app.core.events import Finished, FirstToken, Message
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings import QueueTimeouts
from serve_app.engines.model.model import EngineSequence, StepOutcome
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import (
    Action,
    PartitionLearner,
    Phase,
    ReplicaPlan,
    SimulatedReplica,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
    Timeline,
)
from serve_app.request import Usage
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import Granted, Register, Report, SnapshotEnd, Submit
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from serve_app.serving.scheduler.tuning_endpoint import PartitionUpdate
from serve_app.tuning import LearnedPartitions, StrategicSettings
from tests.builders import key
from tests.lab.simulation.builders import mixed_requests, plan
from tests.parity.jumping_loop import LoopTimeline, run_jumping

TIMEOUT_S = 4.0
SIMULATION = SimulationSettings(control_latency_s=0.0013, report_interval_s=0.2)
Decisions = list[tuple[float, tuple[Command, ...]]]


LEARNED = LearnedPartitions(StrategicSettings(window=50))


def scheduler_settings(policy: str = "fcfs") -> SchedulerSettings:
    return SchedulerSettings(
        model="m",
        policy=policy,
        routing=RoutingSettings(b_short_tokens=500),
        queue_timeout_s=QueueTimeouts(default=TIMEOUT_S),
        max_waiting=12,
    )


def plans() -> list[ReplicaPlan]:
    return [
        plan("s1", "short", max_model_len=1_000, kv_tokens=3_000),
        plan("s2", "short", max_model_len=1_000, kv_tokens=3_000),
        plan("l1", "long", max_model_len=4_000, kv_tokens=6_000),
    ]


def trace(rate_per_s: float, seed: int) -> list[SimulatedRequest]:
    return mixed_requests(300, rate_per_s=rate_per_s, seed=seed, timeout_s=TIMEOUT_S)


def with_keys(requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
    """Assign every other request one of four keys, each with another kind of limit."""
    keys = (
        key("k0", weight=2.0, requests_per_minute=20),
        key("k1", tokens_per_minute=6_000),
        key("k2", concurrent=2),
        key("k3", queued=1),
    )
    for number, simulated in enumerate(requests):
        if number % 2:
            request, which = simulated.request, number // 2 % len(keys)
            submission = msgspec.structs.replace(request.submission, key=keys[which], tenant=f"t{which}")
            simulated.request = replace(request, submission=submission)
    return requests


def simulated_decisions(
    requests: list[SimulatedRequest], policy: str = "fcfs", learner: PartitionLearner | None = None
) -> Decisions:
    log: list[Decision] = []
    Simulation(scheduler_settings(policy), plans(), SIMULATION, log.append, learner).run(requests)
    return [(step.now, step.commands) for step in log if step.commands]


class LiveSystem:
    """Gateway, engines and wires around the real live scheduler, and a tuner without a pull interval."""

    def __init__(
        self,
        requests: list[SimulatedRequest],
        policy: str = "fcfs",
        learner: PartitionLearner | None = None,
    ) -> None:
        self.learner = learner
        self.loop = asyncio.get_running_loop()
        self.timeline = LoopTimeline(self.loop)
        self.requests = {simulated.request.request_id: simulated for simulated in requests}
        self.last_arrival = max(simulated.request.arrived_at for simulated in requests)
        self.over = asyncio.Event()
        self.decisions: Decisions = []
        parts = LiveSchedulerOptions(incarnation=1, channel=ChannelSettings())
        self.live = LiveScheduler(scheduler_settings(policy), parts)
        handle = self.live.core.handle
        self.live.core.handle = partial(self.handle, handle)  # type: ignore[method-assign]
        self.replicas: dict[str, SimulatedReplica] = {}
        self.say = self.live._gateways.on_join("g1", cast("Link", self))

    def handle(self, handle: Any, event: Any, now: float) -> list[Command]:
        commands: list[Command] = handle(event, now)
        if commands:
            self.decisions.append((now, tuple(commands)))
        return commands

    async def run(self) -> Decisions:
        self.say(SnapshotEnd())
        all_plans = plans()
        for number, each in enumerate(all_plans):
            self.add_replica(each, SIMULATION.report_interval_s * number / len(all_plans))
        for simulated in self.requests.values():
            self.timeline.schedule(
                simulated.request.arrived_at, Phase.ARRIVAL, partial(self.submit, simulated)
            )
        await self.over.wait()
        return self.decisions

    def add_replica(self, each: ReplicaPlan, first_report_at: float) -> None:
        replica = SimulatedReplica(each, cast("Timeline", self.timeline), self.step_ended)
        self.replicas[each.replica_id] = replica
        address = ReplicaAddress(replica_id=each.replica_id, pool=each.pool, host="h", port=1, token="t")
        self.live._replicas.on_message(each.replica_id, cast("Link", self), Register(replica.spec, address))
        self.timeline.schedule(first_report_at, Phase.REPORT, partial(self.report, replica))

    def report(self, replica: SimulatedReplica) -> None:
        message = Report(replica.report())
        replica_id = replica.spec.replica_id
        self.later(
            Phase.REPORT, partial(self.live._replicas.on_message, replica_id, cast("Link", self), message)
        )
        next_at = self.timeline.now + SIMULATION.report_interval_s
        self.timeline.schedule(next_at, Phase.REPORT, partial(self.report, replica))

    def submit(self, simulated: SimulatedRequest) -> None:
        request = simulated.request
        self.say(Submit(request.submission, 0.0))
        if self.learner is not None:
            self.tune(self.learner)

    def tune(self, learner: PartitionLearner) -> None:
        for length in self.live.tuner.observed().lengths:
            learner.observe(length)
        partition = learner.due(self.loop.time())
        if partition is not None:
            self.live.tuner.apply_partition(
                PartitionUpdate(partition=partition, reason="test", lengths=0, distance=0.0, age_s=0.0)
            )

    def send(self, message: Message) -> int:
        """Receive a message of the scheduler."""
        if isinstance(message, Granted):
            simulated = self.requests[message.dispatch.request_id]
            self.later(
                Phase.FEEDBACK,
                partial(self.reach_engine, simulated, self.replicas[message.dispatch.replica_id]),
            )
        return 1

    def reach_engine(self, simulated: SimulatedRequest, replica: SimulatedReplica) -> None:
        request = simulated.request
        assert request.shape.prompt_tokens is not None
        replica.accept(
            EngineSequence(
                request.request_id, request.shape.prompt_tokens, simulated.output_tokens, self.loop.time()
            )
        )

    def step_ended(self, outcome: StepOutcome) -> None:
        feedback: list[Message] = [FirstToken(sequence.sequence_id) for sequence in outcome.first_tokens]
        for sequence in outcome.finished:
            usage = Usage(
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=sequence.target_tokens,
                cached_tokens=sequence.cached_tokens,
            )
            feedback.append(Finished(sequence.sequence_id, Outcome.COMPLETED, usage))
        if feedback:
            self.later(Phase.FEEDBACK, partial(self.deliver, feedback))

    def deliver(self, feedback: list[Message]) -> None:
        for message in feedback:
            self.say(message)
        self.end_when_done()

    def end_when_done(self) -> None:
        """End once all requests have: the last requests are long enough to outlast the last arrival."""
        if not len(self.live.core) and self.loop.time() >= self.last_arrival:
            self.over.set()

    def later(self, phase: Phase, action: Action) -> None:
        self.timeline.schedule(self.timeline.now + SIMULATION.control_latency_s, phase, action)


@pytest.mark.parametrize(
    ("rate_per_s", "seed", "ends"),
    [
        (6.0, 1, {Outcome.COMPLETED}),
        (15.0, 2, {Outcome.COMPLETED, Outcome.REJECTED_DEADLINE_UNMEETABLE}),
        (60.0, 3, {Outcome.COMPLETED, Outcome.EXPIRED, Outcome.REJECTED_QUEUE_FULL}),
    ],
)
def test_the_live_shell_and_the_simulator_decide_the_same(
    rate_per_s: float, seed: int, ends: set[Outcome]
) -> None:
    expected = simulated_decisions(trace(rate_per_s, seed))

    async def live() -> Decisions:
        return await LiveSystem(trace(rate_per_s, seed)).run()

    decisions: Decisions = run_jumping(live)
    outcomes = {c.conclusion.outcome for _, commands in expected for c in commands if isinstance(c, Conclude)}
    assert outcomes >= ends
    assert len(expected) > 300
    assert decisions == expected[: len(decisions)]
    assert len(decisions) == len(expected)


def test_they_decide_the_same_about_the_limits_of_keys() -> None:
    expected = simulated_decisions(with_keys(trace(30.0, 2)))

    async def live() -> Decisions:
        return await LiveSystem(with_keys(trace(30.0, 2))).run()

    texts = [
        command.conclusion.message
        for _, commands in expected
        for command in commands
        if isinstance(command, Conclude) and command.conclusion.outcome is Outcome.REJECTED_RATE_LIMITED
    ]
    for limit in ("requests per minute", "tokens per minute", "concurrent requests", "queued requests"):
        assert any(limit in text for text in texts), limit
    assert run_jumping(live) == expected


def test_they_decide_the_same_with_queues_learned_during_the_run() -> None:
    expected = simulated_decisions(trace(15.0, 4), "ewsjf", LEARNED.learner())

    async def live() -> Decisions:
        return await LiveSystem(trace(15.0, 4), "ewsjf", LEARNED.learner()).run()

    assert run_jumping(live) == expected
    # Without learned state, they decide otherwise.
    assert simulated_decisions(trace(15.0, 4), "ewsjf") != expected
