"""Builders for core values, and a scheduler on a manual clock."""

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.events import Arrived, Event, ReplicaJoined, ReplicaReported
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.routing.replica_state import Running
from serve_app.errors import Conclusion
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.request import (
    KeyLimits,
    KeyTerms,
    LatencyTarget,
    PriorityClass,
    ProgramHint,
    PromptShape,
    Request,
    RequestSpec,
    Submission,
)


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
    key: KeyTerms | None = None,
    bound_to: str | None = None,
    adapter: str | None = None,
    messages: int = 0,
    program: ProgramHint | None = None,
    revocable: bool = False,
    target: LatencyTarget | None = None,
) -> Request:
    exact = PromptShape(
        text_bytes=4 * prompt_tokens if text_bytes is None else text_bytes,
        prompt_tokens=prompt_tokens,
        messages=messages,
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
                adapter=adapter,
            ),
            tenant=tenant,
            priority=priority,
            no_wait=no_wait,
            prefix=prefix,
            key=key,
            bound_to=bound_to,
            program=program,
            revocable=revocable,
            target=target,
        ),
        gateway_id=gateway_id,
        arrived_at=arrived_at,
        expires_at=expires_at,
        attempts=attempts,
    )


def key(key_id: str = "k1", *, weight: float | None = None, **limits: int) -> KeyTerms:
    """Return the terms of an API key."""
    return KeyTerms(key_id=key_id, weight=weight, limits=KeyLimits(**limits))


def spec(
    replica_id: str = "s1",
    pool: str = "short",
    *,
    max_model_len: int = 1_000,
    kv_tokens: int | None = 10_000,
    max_num_seqs: int | None = 8,
    adapters: tuple[str, ...] = (),
    stall_timeout_s: float | None = None,
    long_prefill_token_threshold: int | None = None,
) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=replica_id,
        pool=pool,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        adapters=adapters,
        stall_timeout_s=stall_timeout_s,
        long_prefill_token_threshold=long_prefill_token_threshold,
    )


def report(
    *,
    received: int | None = 0,
    waiting: int | None = 0,
    running: int | None = 0,
    kv_usage_ratio: float | None = 0.0,
    tpot_s: float | None = None,
    draining: bool = False,
    computes: bool | None = None,
) -> ReplicaReport:
    return ReplicaReport(
        received=received,
        waiting=waiting,
        running=running,
        kv_usage_ratio=kv_usage_ratio,
        tpot_s=tpot_s,
        draining=draining,
        computes=computes,
    )


def settings(**changes: Any) -> SchedulerSettings:
    """Return settings with FCFS as the default policy."""
    usual = {"model": "m", "policy": "fcfs", "routing": RoutingSettings(b_short_tokens=500)}
    return SchedulerSettings(**{**usual, **changes})


ONE_POOL = RoutingSettings(pools=("only",))
_ESTIMATOR = TokenEstimator(EstimatorSettings())


def scheduled_request(
    request_id: str = "r1", *, sequence: int = 1, pools: tuple[str, ...] = ("only",), **fields: Any
) -> ScheduledRequest:
    """Return a request in the form that the scheduler admits."""
    wanted = request(request_id, **fields)
    return ScheduledRequest(wanted, _ESTIMATOR.estimate(wanted), sequence, pools)


def running_of(scheduled: ScheduledRequest) -> Running:
    """Return what a dispatched request holds on its replica."""
    assert scheduled.running is not None
    return scheduled.running


class ManualDriver:
    """A scheduler on a manual clock."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler = Scheduler(settings(**changes), policies=SIMULATED_POLICIES)
        self.now = 0.0

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return self.scheduler.handle(event, self.now)

    def join(self, replica_id: str = "s1", pool: str = "short", **limits: Any) -> list[Command]:
        return self.feed(ReplicaJoined(spec(replica_id, pool, **limits))) + self.report(replica_id)

    def report(self, replica_id: str = "s1", *, after_s: float = 0.0, **load: Any) -> list[Command]:
        return self.feed(ReplicaReported(replica_id, report(**load)), after_s=after_s)

    def arrive(self, request_id: str = "r1", **fields: Any) -> list[Command]:
        fields.setdefault("arrived_at", self.now)
        return self.feed(Arrived(request(request_id, **fields)))

    def find(self, request_id: str) -> ScheduledRequest:
        """Return a queued or running request."""
        found = self.scheduler.find(request_id)
        assert found is not None
        return found

    def wait_reasons(self, request_id: str) -> str:
        return self.scheduler.dispatcher.wait_reasons(self.find(request_id), self.now)


def one_replica(
    replica_id: str = "r1", *, limits: Mapping[str, float | None] | None = None, **changes: Any
) -> ManualDriver:
    """Return a scheduler with a single pool of one replica."""
    driver = ManualDriver(routing=ONE_POOL, **changes)
    driver.join(replica_id, "only", **(limits or {}))
    return driver


def two_pools(**changes: Any) -> ManualDriver:
    """Return a scheduler with a short pool of replica `s1` and a long pool of replica `l1`."""
    driver = ManualDriver(**changes)
    driver.join("s1", "short", max_model_len=1_000)
    driver.join("l1", "long", max_model_len=4_000, kv_tokens=16_000)
    return driver


def fill(driver: ManualDriver, name: str = "f", **fields: Any) -> None:
    """Submit three requests whose answers have not begun, which close a replica."""
    for number in range(3):
        driver.arrive(f"{name}{number}", **fields)


def requests_in_memory() -> int:
    """Return the number of admitted requests that anything still refers to."""
    gc.collect()
    return sum(isinstance(each, ScheduledRequest) for each in gc.get_objects())


def dispatched(commands: Sequence[Command]) -> list[tuple[str, str]]:
    return [(command.request_id, command.replica_id) for command in commands if isinstance(command, Dispatch)]


def concluded(commands: Sequence[Command]) -> list[tuple[str, str]]:
    return [
        (command.request_id, command.conclusion.outcome.value)
        for command in commands
        if isinstance(command, Conclude)
    ]


def only_conclusion(commands: Sequence[Command]) -> Conclusion:
    """Return the conclusion in the only command."""
    (command,) = commands
    assert isinstance(command, Conclude)
    return command.conclusion


def retry_after_s(commands: Sequence[Command]) -> float:
    """Return the `Retry-After` of the only rejected request."""
    delay_s = only_conclusion(commands).retry_after_s
    assert delay_s is not None
    return delay_s
