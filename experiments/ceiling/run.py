"""How many requests per second can one scheduler do, and what breaks first?

Drives the production scheduler through the events of each request, with tenants, two pools and the queues of
EWSJF. Each engine is a simple queue, so nearly all of the time is the scheduler's. CPU time is read
around each event, so other processes hardly count. Python's garbage collector is tuned as in the scheduler's
own process.

An engine computes one prompt after another, and decodes every sequence at one pace. It reports what a real
engine reports: received requests, requests that wait for prefill, and KV use. Lengths come from a trace;
times are those of an 8B model on one H100 according to its profile.

In the first part the fleet is large enough to keep up. In the second the backlog has a constant length: a
request arrives as soon as fewer are queued.
"""

import gc
import heapq
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.metrics.summary import Distribution
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.settings_base import POSITIVE, at_least, settings
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import (
    Disclosure,
    at_rate,
    choose_trace,
    fit,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import Trace, TraceChoice
from serve_app.request import Usage
from serve_app.serving.process import tune_memory

_CONTEXT_TOKENS = {"short": 8_192, "long": 32_768}
_KV_BLOCK_TOKENS = 16
# Every request has a timeout, as in production, but none of them ends.
_TIMEOUT_S = 1_000_000.0
# Arrivals at the end of the backlog's growth, from which its cost is read.
_PROBES = 200


POOLS = ("short", "long")
_KV_TOKENS = 427_000
_MAX_NUM_SEQS = 256
_PREFILL_S = 0.008
_PREFILL_TOKEN_S = 0.000_022
_STEP_S = 0.02


@dataclass(slots=True)
class _Engine:
    """One engine.

    Attributes:
        free_at: when all dispatched prompts are computed.
        starts: start of the prefill of recently dispatched requests.
    """

    spec: ReplicaSpec
    received: int = 0
    running: int = 0
    held_tokens: int = 0
    free_at: float = 0.0
    starts: list[float] = field(default_factory=list)

    def accept(self, prompt_tokens: int, now: float) -> float:
        """Accept a request; return the time of its first token."""
        self.received += 1
        self.running += 1
        begins_at = max(now, self.free_at)
        self.starts.append(begins_at)
        self.free_at = begins_at + _PREFILL_S + _PREFILL_TOKEN_S * prompt_tokens
        return self.free_at

    def report(self, now: float) -> ReplicaReport:
        """Return the engine's report at this time."""
        self.starts = [begins_at for begins_at in self.starts if begins_at > now]
        waiting = len(self.starts)
        return ReplicaReport(
            received=self.received,
            waiting=waiting,
            running=self.running - waiting,
            kv_usage_ratio=min(0.95, self.held_tokens / _KV_TOKENS),
            tpot_s=_STEP_S,
            computes=True,
        )


class Engines:
    """All engines; produces their events and the arrivals in order of time.

    Args:
        requests: in the order of arrival.
    """

    def __init__(
        self, replicas: int, requests: Sequence[SimulatedRequest], *, report_interval_s: float
    ) -> None:
        self._report_interval_s = report_interval_s
        self._serial = itertools.count()
        self._timeline: list[tuple[float, int, ev.Event]] = []
        self._live: dict[str, SimulatedRequest] = {}
        self._placed: dict[str, _Engine] = {}
        self._arrivals = iter(requests)
        self._expects_arrivals = False
        # In the order of pools: half of the replicas are short, half long.
        self._engines = {
            spec.replica_id: _Engine(spec)
            for spec in (_spec(number, POOLS[2 * number >= replicas]) for number in range(replicas))
        }

    def specs(self) -> Iterator[ReplicaSpec]:
        """Yield the specifications with which replicas register."""
        return (engine.spec for engine in self._engines.values())

    def begin(self) -> None:
        """Schedule the first reports, spread over the interval."""
        for place, replica_id in enumerate(self._engines):
            first_s = self._report_interval_s * place / len(self._engines)
            self._at(first_s, ev.ReplicaReported(replica_id, self._engines[replica_id].report(0.0)))

    def expect_arrivals(self) -> None:
        """Let requests arrive at their own times from now on."""
        if not self._expects_arrivals:
            self._expects_arrivals = True
            self._next_arrival()

    def arrival(self, now: float) -> ev.Arrived:
        """Return the next request as an arrival now, with its own queue timeout."""
        simulated = next(self._arrivals)
        request = simulated.request
        moved = replace(request, arrived_at=now, expires_at=now + request.expires_at - request.arrived_at)
        self._live[request.request_id] = replace(simulated, request=moved)
        return ev.Arrived(moved)

    def next_event(self) -> tuple[float, ev.Event]:
        """Return the next event and its time; a report schedules the next one."""
        now, _, event = heapq.heappop(self._timeline)
        if isinstance(event, ev.ReplicaReported):
            self._at(now + self._report_interval_s, event)
            event = ev.ReplicaReported(event.replica_id, self._engines[event.replica_id].report(now))
        elif isinstance(event, ev.Arrived):
            self._next_arrival()
        elif isinstance(event, ev.FirstToken):
            self._plan_end(event.request_id, now)
        elif isinstance(event, ev.Finished):
            simulated, engine = self._live.pop(event.request_id), self._placed.pop(event.request_id)
            engine.running -= 1
            engine.held_tokens -= _tokens(simulated)
        return now, event

    def dispatch(self, command: Dispatch, now: float) -> None:
        """Start a dispatched request on its engine."""
        simulated, engine = self._live[command.request_id], self._engines[command.replica_id]
        self._placed[command.request_id] = engine
        engine.held_tokens += _tokens(simulated)
        first_at = engine.accept(simulated.request.shape.prompt_tokens or 0, now)
        self._at(first_at, ev.FirstToken(command.request_id))

    def drop(self, request_id: str) -> None:
        """Forget a rejected request."""
        self._live.pop(request_id, None)

    def _next_arrival(self) -> None:
        simulated = next(self._arrivals, None)
        if simulated is not None:
            self._live[simulated.request.request_id] = simulated
            self._at(simulated.request.arrived_at, ev.Arrived(simulated.request))

    def _plan_end(self, request_id: str, now: float) -> None:
        simulated = self._live[request_id]
        usage = Usage(
            prompt_tokens=simulated.request.shape.prompt_tokens or 0, output_tokens=simulated.output_tokens
        )
        ends_at = now + _STEP_S * simulated.output_tokens
        self._at(ends_at, ev.Finished(request_id, Outcome.COMPLETED, usage))

    def _at(self, time_s: float, event: ev.Event) -> None:
        heapq.heappush(self._timeline, (time_s, next(self._serial), event))


def _spec(number: int, pool: str) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=f"r{number}",
        pool=pool,
        max_model_len=_CONTEXT_TOKENS[pool],
        kv_tokens=_KV_TOKENS,
        max_num_seqs=_MAX_NUM_SEQS,
        tpot_s=_STEP_S,
        prefill_token_s=_PREFILL_TOKEN_S,
    )


def _tokens(simulated: SimulatedRequest) -> int:
    return (simulated.request.shape.prompt_tokens or 0) + simulated.output_tokens


KINDS = {
    ev.Arrived: "arrival",
    ev.FirstToken: "first token",
    ev.Finished: "finish",
    ev.ReplicaReported: "report",
    ev.Woke: "wake-up",
}


@dataclass(slots=True)
class Costs:
    """Costs over a span of simulated time.

    Attributes:
        spent_ns: CPU time per kind of event, in the order of events, including the dispatches that an event
            causes.
        waits_s: queue time of each dispatch.
        span_s: seconds of simulated time.
    """

    spent_ns: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS.values()})
    waits_s: list[float] = field(default_factory=list)
    rejected: int = 0
    span_s: float = 0.0

    @property
    def requests(self) -> int:
        """Return the number of arrivals."""
        return len(self.spent_ns["arrival"])


class CorePlay:
    """A scheduler with production settings, and its fleet."""

    def __init__(self, engines: Engines, *, policy: str, b_short_tokens: int) -> None:
        routing = RoutingSettings(pools=POOLS, b_short_tokens=b_short_tokens)
        self._engines = engines
        self.scheduler = Scheduler(scheduler_settings(policy, routing, {}))
        for spec in engines.specs():
            self.scheduler.handle(ev.ReplicaJoined(spec), 0.0)
        engines.begin()
        self.now = 0.0

    def play(self, requests: int) -> Costs:
        """Play until this many more requests have arrived, each at its own time."""
        self._engines.expect_arrivals()
        costs, began = Costs(), self.now
        while costs.requests < requests:
            self._next(costs)
        costs.span_s = self.now - began
        return costs

    def play_backlog(self, waiting: int, requests: int) -> Costs:
        """Play until this many more requests have arrived, each when fewer than `waiting` are queued."""
        costs, began = Costs(), self.now
        while costs.requests < requests:
            while len(self.scheduler.queue) < waiting and costs.requests < requests:
                self._feed(self._engines.arrival(self.now), self.now, costs)
            self._next(costs)
        costs.span_s = self.now - began
        return costs

    def _next(self, costs: Costs) -> None:
        at, event = self._engines.next_event()
        while (wakes_at := self.scheduler.next_wakeup()) is not None and wakes_at < at:
            # A wake-up that was due just before a simultaneous event counts from then.
            self._feed(ev.Woke(), max(wakes_at, self.now), costs)
        self._feed(event, at, costs)

    def _feed(self, event: ev.Event, now: float, costs: Costs) -> None:
        self.now = now
        began = time.thread_time_ns()
        commands = self.scheduler.handle(event, now)
        costs.spent_ns[KINDS[type(event)]].append(time.thread_time_ns() - began)
        for command in commands:
            if isinstance(command, Dispatch):
                costs.waits_s.append(command.queue_wait_s)
                self._engines.dispatch(command, now)
            elif isinstance(command, Conclude) and not command.dispatched:
                costs.rejected += 1
                self._engines.drop(command.request_id)


def median_tokens(requests: Sequence[SimulatedRequest]) -> int:
    """Return the boundary that puts half of all tokens in the short pool."""
    sizes = sorted((one.request.shape.prompt_tokens or 0) + one.output_tokens for one in requests)
    half, below = sum(sizes) / 2, 0
    for size in sizes:
        below += size
        if below >= half:
            break
    return size


@settings
class CeilingSettings:
    """Settings of the experiment.

    Attributes:
        replicas: sizes of fleets that keep up.
        tenants: number of tenants that share all requests.
        waiting: lengths of the backlog, at `waiting_replicas` replicas.
        per_replica_per_s: requests per second for each replica.
        fill_requests: arrivals before the measurement for ten replicas; larger fleets get more.
        requests: measured arrivals, likewise.
    """

    replicas: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    waiting_replicas: Annotated[int, at_least(2)] = 20
    per_replica_per_s: Annotated[float, POSITIVE] = 10.0
    tenants: Annotated[int, at_least(1)] = 200
    fill_requests: Annotated[int, at_least(1)] = 500
    requests: Annotated[int, at_least(1)] = 1_000
    report_interval_s: Annotated[float, POSITIVE] = 0.2
    trace: str = "azure-conv"
    policy: str = "ewsjf"
    seed: int = 0


def play(settings: CeilingSettings, context: Context) -> Iterator[Measurement]:
    """Measure one fleet after another, then the backlogs."""
    tune_memory()
    for replicas in settings.replicas:
        key: dict[str, Any] = {"part": "events", "replicas": replicas}
        if not context.has(key):
            yield _row(settings, key, _events(settings, replicas))
    for waiting in settings.waiting:
        key = {"part": "waiting", "waiting": waiting}
        if not context.has(key):
            # A new process, because memory freed by an earlier part would count as free.
            context_of_its_own = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context_of_its_own) as process:
                figures = process.submit(_waiting, settings, waiting).result()
            yield _row(settings, key, figures)


def _row(settings: CeilingSettings, key: dict[str, Any], figures: dict[str, Any]) -> Measurement:
    return Measurement(key=key, figures=figures, seeds=(settings.seed,), traces=trace_sources(settings.trace))


def _events(settings: CeilingSettings, replicas: int) -> dict[str, Any]:
    """Measure the costs of a fleet that keeps up."""
    # More requests for a large fleet, so that each of its replicas gets some.
    times = max(1.0, (replicas / 10) ** 0.5)
    fill, measured = round(times * settings.fill_requests), round(times * settings.requests)
    trace = _trace(settings, fill + measured + 1, settings.per_replica_per_s * replicas)
    core = _core(settings, replicas, _requests(trace))
    core.play(fill)
    costs = core.play(measured)
    return _figures(costs) | {
        "offered_per_s": settings.per_replica_per_s * replicas,
        "reports_per_s": replicas / settings.report_interval_s,
    }


def _figures(costs: Costs) -> dict[str, Any]:
    spent_us = {kind: [spent / 1_000 for spent in costs.spent_ns[kind]] for kind in KINDS.values()}
    return {
        "all_us": sum(map(sum, spent_us.values())),
        "events_us": {kind: Distribution.of(us).as_json() for kind, us in spent_us.items() if us},
        "requests": costs.requests,
        "span_s": costs.span_s,
        "rejected": costs.rejected,
        "longest_wait_s": max(costs.waits_s, default=0.0),
    }


def _waiting(settings: CeilingSettings, waiting: int) -> dict[str, Any]:
    """Measure memory, including the requests, and costs at a constant backlog."""
    tune_memory()
    replicas = settings.waiting_replicas
    fill, measured = settings.fill_requests * 2, settings.requests
    rate_per_s = settings.per_replica_per_s * replicas
    trace = _trace(settings, waiting + fill + measured + 1, rate_per_s)
    gc.collect()
    before = _resident_bytes()
    core = _core(settings, replicas, _requests(trace))
    growth = core.play_backlog(waiting, waiting)
    after = _resident_bytes()
    core.play_backlog(waiting, fill)
    costs = core.play_backlog(waiting, measured)
    growth.spent_ns["arrival"] = growth.spent_ns["arrival"][-_PROBES:]
    return _figures(costs) | {
        "replicas": replicas,
        "waiting": len(core.scheduler.queue),
        "made": len(trace.requests),
        "bytes_per_request": (after - before) / len(trace.requests),
        "resident_bytes": after,
        "last_of_growth": _figures(growth),
    }


def _core(settings: CeilingSettings, replicas: int, requests: list[SimulatedRequest]) -> CorePlay:
    engines = Engines(replicas, requests, report_interval_s=settings.report_interval_s)
    return CorePlay(engines, policy=settings.policy, b_short_tokens=median_tokens(requests))


def _trace(settings: CeilingSettings, count: int, rate_per_s: float) -> Trace:
    choice = TraceChoice(name=settings.trace, requests=count, tenants=str(settings.tenants))
    return at_rate(fit(choose_trace(choice, settings.seed), _CONTEXT_TOKENS["long"]).trace, rate_per_s)


def _requests(trace: Trace) -> list[SimulatedRequest]:
    return list(requests_of(trace, Disclosure(queue_timeout_s=_TIMEOUT_S), _KV_BLOCK_TOKENS))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _unavailable() -> str | None:
    return (
        None if Path("/proc/self/statm").exists() else "resident memory is read from /proc, which is missing"
    )


EXPERIMENT = Experiment(settings=CeilingSettings, play=play, unavailable=_unavailable)
