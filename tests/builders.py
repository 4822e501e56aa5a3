"""Short ways to make the values that the core speaks in."""

import math
from typing import Any

from serve_app.request import PriorityClass, PromptShape, Request, RequestSpec, Submission
from serve_app.routing.pools import RoutingSettings
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.scheduling import Scheduler, SchedulerSettings
from serve_app.scheduling.commands import Command, Conclude, Dispatch
from serve_app.scheduling.events import Arrived, Event, ReplicaJoined, ReplicaReported


def request(
    request_id: str = "r1",
    *,
    prompt_tokens: int = 40,
    max_output_tokens: int | None = 10,
    choices: int = 1,
    arrived_at: float = 0.0,
    expires_at: float = math.inf,
    gateway_id: str = "g1",
    model: str = "m",
    tenant: str = "t1",
    priority: PriorityClass = PriorityClass.DEFAULT,
    no_wait: bool = False,
    streamed: bool = True,
    prefix: tuple[int, ...] = (),
    attempts: int = 0,
    text_bytes: int | None = None,
    shape: PromptShape | None = None,
) -> Request:
    exact = PromptShape(
        text_bytes=4 * prompt_tokens if text_bytes is None else text_bytes, prompt_tokens=prompt_tokens
    )
    return Request(
        submission=Submission(
            request_id=request_id,
            spec=RequestSpec(
                model=model,
                shape=shape or exact,
                max_output_tokens=max_output_tokens,
                choices=choices,
                streamed=streamed,
            ),
            tenant=tenant,
            priority=priority,
            no_wait=no_wait,
            prefix=prefix,
        ),
        gateway_id=gateway_id,
        arrived_at=arrived_at,
        expires_at=expires_at,
        attempts=attempts,
    )


def spec(
    replica_id: str = "s1",
    pool: str = "short",
    *,
    max_model_len: int = 1_000,
    kv_tokens: int = 10_000,
    max_num_seqs: int = 8,
) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=replica_id,
        pool=pool,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
    )


def report(
    *,
    received: int = 0,
    waiting: int = 0,
    running: int = 0,
    kv_usage_ratio: float = 0.0,
    tpot_s: float | None = None,
    draining: bool = False,
) -> ReplicaReport:
    return ReplicaReport(
        received=received,
        waiting=waiting,
        running=running,
        kv_usage_ratio=kv_usage_ratio,
        tpot_s=tpot_s,
        draining=draining,
    )


def settings(**changes: Any) -> SchedulerSettings:
    """In the order of arrival, unless a test is about another one."""
    usual = {"model": "m", "policy": "fcfs", "routing": RoutingSettings(b_short_tokens=500)}
    return SchedulerSettings(**{**usual, **changes})


class Simulation:
    """A scheduler with the clock in hand."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler = Scheduler(settings(**changes))
        self.now = 0.0

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return self.scheduler.handle(event, self.now)

    def join(self, replica_id: str = "s1", pool: str = "short", **limits: int) -> list[Command]:
        return self.feed(ReplicaJoined(spec(replica_id, pool, **limits))) + self.report(replica_id)

    def report(self, replica_id: str = "s1", *, after_s: float = 0.0, **load: Any) -> list[Command]:
        return self.feed(ReplicaReported(replica_id, report(**load)), after_s=after_s)

    def arrive(self, request_id: str = "r1", **fields: Any) -> list[Command]:
        fields.setdefault("arrived_at", self.now)
        return self.feed(Arrived(request(request_id, **fields)))


def dispatched(commands: list[Command]) -> list[tuple[str, str]]:
    return [(command.request_id, command.replica_id) for command in commands if isinstance(command, Dispatch)]


def concluded(commands: list[Command]) -> list[tuple[str, str]]:
    return [
        (command.request_id, command.conclusion.outcome.value)
        for command in commands
        if isinstance(command, Conclude)
    ]
