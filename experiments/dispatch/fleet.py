"""Fleets under steady traffic, for `bench_dispatch.py`: who decides, what happens, what each event costs.

A *decider* takes the scheduler's events and returns its commands. One is the production scheduler; the
others only choose a replica and keep count, and show what the clock, the event loop of this file and the
size of the working set cost by themselves.
"""

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from serve_app.errors import Outcome
from serve_app.request import Request, Usage
from serve_app.routing.pools import RoutingSettings
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Command, Dispatch
from serve_app.scheduling.policies.partition import Partition
from serve_app.scheduling.scheduler import Scheduler
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.conversations import ConversationSettings, conversations
from serve_app.workloads.trace import Trace

POOLS = ("short", "long")
_CONTEXT_TOKENS = {"short": 8_192, "long": 16_384}
# More than running requests need on average, so that places run out before tokens do.
_KV_TOKENS_PER_PLACE = 8_000
_KV_BLOCK_TOKENS = 16
# A prefill, and a step of the decode: of a 70B model on four H100, as its profile states them.
_PREFILL_S = 0.05
_PREFILL_S_PER_TOKEN = 0.000_107
_STEP_S = 0.035
# Sessions go on soon, and are cut out when about as many end as begin.
_PAUSE_S = 4.0
_SETTLED_S = 40.0
_NOMINAL_S = 8.0
KINDS = ("submit", "dispatch", "first token", "finish", "report")


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and how long it takes once it is dispatched."""

    request: Request
    prefill_s: float
    decode_s: float
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """A fleet and what is asked of it.

    Attributes:
        places: sequences that each replica runs at once.
        b_short_tokens: border under which half of the place-seconds are at home.
    """

    replicas: int
    places: int
    b_short_tokens: int
    jobs: Sequence[Job]
    report_interval_s: float

    def specs(self) -> list[ReplicaSpec]:
        """Half of the replicas short, half long, by turns."""
        return [
            ReplicaSpec(
                replica_id=f"r{number}",
                pool=POOLS[number % 2],
                max_model_len=_CONTEXT_TOKENS[POOLS[number % 2]],
                kv_tokens=self.places * _KV_TOKENS_PER_PLACE,
                max_num_seqs=self.places,
            )
            for number in range(self.replicas)
        ]

    @property
    def home(self) -> Callable[[Request], str]:
        """The pool of a request whose lengths are known."""
        return lambda request: POOLS[_budget(request) > self.b_short_tokens]


def traffic(
    replicas: int, places: int, taken: float, requests: int, *, report_interval_s: float, seed: int
) -> FleetTraffic:
    """Conversations, cut out of the midst of them, at the rate that takes such a share of all places.

    By Little's law the places taken are the work that comes per second, in place-seconds.
    """
    settings = ConversationSettings(pause_s=_PAUSE_S)
    nominal_per_s = taken * places * replicas / _NOMINAL_S
    before = round(_SETTLED_S * nominal_per_s)
    drawn = conversations(before + requests, nominal_per_s, seed, settings).requests[before:]
    work_s = sum(_prefill_s(one.prompt_tokens) + _STEP_S * one.output_tokens for one in drawn)
    span_s = work_s / (taken * places * replicas)
    first_s, scale = drawn[0].arrival_s, span_s / (drawn[-1].arrival_s - drawn[0].arrival_s)
    moved = tuple(replace(one, arrival_s=scale * (one.arrival_s - first_s)) for one in drawn)
    jobs = _jobs(Trace(name="conversations", source="generated", requests=moved))
    return FleetTraffic(
        replicas=replicas,
        places=places,
        b_short_tokens=_border(jobs),
        jobs=jobs,
        report_interval_s=report_interval_s,
    )


def _jobs(trace: Trace) -> list[Job]:
    return [
        Job(
            one.request,
            _prefill_s(one.request.shape.prompt_tokens or 0),
            _STEP_S * one.output_tokens,
            one.output_tokens,
        )
        for one in requests_of(trace, Disclosure(output_known=True), _KV_BLOCK_TOKENS)
    ]


def _prefill_s(prompt_tokens: int) -> float:
    return _PREFILL_S + _PREFILL_S_PER_TOKEN * prompt_tokens


def _budget(request: Request) -> int:
    return (request.shape.prompt_tokens or 0) + (request.max_output_tokens or 0)


def _border(jobs: Sequence[Job]) -> int:
    ordered = sorted(jobs, key=lambda job: _budget(job.request))
    half = sum(job.prefill_s + job.decode_s for job in jobs) / 2
    sums = itertools.accumulate(job.prefill_s + job.decode_s for job in ordered)
    return next(_budget(job.request) for job, below in zip(ordered, sums, strict=True) if below >= half)


# Deciders


class Decider(Protocol):
    """Takes events, returns commands.

    Attributes:
        choosing_ns: nanoseconds of the last event that went into choosing, where that is known apart.
    """

    choosing_ns: int

    def handle(self, event: ev.Event, now: float) -> Sequence[Command]:
        """What is to be done."""


class Production:
    """The scheduler as it runs, with its dispatcher on a stopwatch.

    The stopwatch counts a call of the dispatcher only where requests wait: without any it returns at once.
    """

    def __init__(self, policy: str, fleet: FleetTraffic, partition: Partition, *, affinity: bool) -> None:
        routing = RoutingSettings(pools=POOLS, b_short_tokens=fleet.b_short_tokens)
        settings = scheduler_settings(policy, routing, {"affinity.enabled": affinity})
        self.scheduler = Scheduler(settings)
        self.choosing_ns = 0
        run, room = self.scheduler.dispatcher.run, self.scheduler.queue

        def timed(now: float, send: Callable[..., None]) -> None:
            if not room:
                run(now, send)
                return
            began = time.perf_counter_ns()
            run(now, send)
            self.choosing_ns += time.perf_counter_ns() - began

        # The scheduler looks the method up at each call, so this is its dispatcher as it is.
        setattr(self.scheduler.dispatcher, "run", timed)  # noqa: B010 - a type checker refuses the plain way
        self.scheduler.handle(ev.PartitionChanged(partition), 0.0)

    def handle(self, event: ev.Event, now: float) -> Sequence[Command]:
        """As the scheduler does."""
        self.choosing_ns = 0
        return self.scheduler.handle(event, now)


@dataclass(slots=True)
class _Counter:
    """What a baseline knows of a replica."""

    replica_id: str
    order: int
    in_flight: int = 0


Choice = Callable[[list[_Counter]], _Counter]


class Baseline:
    """Chooses a replica of the request's home at once; no queue, no estimate, no limits.

    Args:
        choice: makes a choice for each pool, which may remember what it chose.
    """

    def __init__(self, choice: Callable[[], Choice], fleet: FleetTraffic) -> None:
        self.choosing_ns = 0
        self._home = fleet.home
        self._pools: dict[str, list[_Counter]] = {pool: [] for pool in POOLS}
        for spec in fleet.specs():
            members = self._pools[spec.pool]
            members.append(_Counter(spec.replica_id, len(members)))
        self._choices = {pool: choice() for pool in POOLS}
        self._running: dict[str, _Counter] = {}

    def handle(self, event: ev.Event, now: float) -> Sequence[Command]:
        """Choose when a request comes, count down when one is over."""
        self.choosing_ns = 0
        if isinstance(event, ev.Arrived):
            request = event.request
            pool = self._home(request)
            began = time.perf_counter_ns()
            replica = self._choices[pool](self._pools[pool])
            self.choosing_ns = time.perf_counter_ns() - began
            replica.in_flight += 1
            self._running[request.request_id] = replica
            return [
                Dispatch(
                    request_id=request.request_id,
                    gateway_id=request.gateway_id,
                    replica_id=replica.replica_id,
                    pool=pool,
                    length_queue="",
                    estimated_tokens=_budget(request),
                    queue_wait_s=now - request.arrived_at,
                )
            ]
        if isinstance(event, ev.Finished):
            self._running.pop(event.request_id).in_flight -= 1
        return []


def round_robin() -> Choice:
    """One after the other."""
    turns = itertools.count()
    return lambda members: members[next(turns) % len(members)]


def power_of_two() -> Choice:
    """The less busy of two."""
    rng = random.Random(1)  # noqa: S311 - a measurement, no secret

    def choose(members: list[_Counter]) -> _Counter:
        count = len(members)
        one, other = members[int(rng.random() * count)], members[int(rng.random() * count)]
        return one if one.in_flight <= other.in_flight else other

    return choose


def least_loaded() -> Choice:
    """The least busy of all, which looks at every one."""
    return lambda members: min(members, key=lambda member: (member.in_flight, member.order))


# What happens


@dataclass(slots=True)
class Window:
    """What was measured over a number of requests.

    Attributes:
        costs_ns: each event's cost, by kind. The dispatcher's part is taken out of the event that it was in,
            and stands under `dispatch`, shared out where one event let several go.
        busy: CPU seconds over wall-clock seconds; below 0.95 somebody else had the core as well.
        taken: mean share of places taken.
    """

    costs_ns: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    submitted: int = 0
    dispatched: int = 0
    busy: float = 0.0
    taken: float = 0.0

    def per_request_us(self) -> float:
        """Microseconds of the usual request: the median of each kind of event but reports, together."""
        costs = (self.costs_ns[kind] for kind in KINDS if kind != "report")
        return sum(median(cost) for cost in costs if cost) / 1_000


class Drive:
    """One fleet, its traffic and its decider, as far as time has come."""

    def __init__(self, decider: Decider, fleet: FleetTraffic) -> None:
        self._decider, self._fleet = decider, fleet
        self._jobs = iter(fleet.jobs)
        self._by_id: dict[str, Job] = {}
        self._serial = itertools.count()
        self._timeline: list[tuple[float, int, ev.Event]] = []
        self._received = {spec.replica_id: 0 for spec in fleet.specs()}
        self._running = dict.fromkeys(self._received, 0)
        self._replica_of: dict[str, str] = {}
        for place, spec in enumerate(fleet.specs()):
            decider.handle(ev.ReplicaJoined(spec), 0.0)
            first_s = fleet.report_interval_s * place / fleet.replicas
            self._at(first_s, ev.ReplicaReported(spec.replica_id, self._report(spec.replica_id)))
        self._arrive()

    def play(self, requests: int) -> Window:
        """Go on until so many more requests have come."""
        window, taken, events = Window(), 0, 0
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        while window.submitted < requests:
            now, _, event = heapq.heappop(self._timeline)
            if isinstance(event, ev.ReplicaReported):
                self._at(now + self._fleet.report_interval_s, event)
                event = ev.ReplicaReported(event.replica_id, self._report(event.replica_id))
            commands = self._timed(event, now, window)
            self._happened(event, now, window)
            for command in commands:
                self._carry_out(command, now)
            taken += len(self._replica_of)
            events += 1
        window.busy = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
        window.taken = taken / events / (self._fleet.replicas * self._fleet.places)
        return window

    def _timed(self, event: ev.Event, now: float, window: Window) -> Sequence[Command]:
        decider = self._decider
        began = time.perf_counter_ns()
        commands = decider.handle(event, now)
        spent_ns = time.perf_counter_ns() - began
        sent = sum(isinstance(command, Dispatch) for command in commands)
        if sent:
            spent_ns -= decider.choosing_ns
            window.costs_ns["dispatch"] += [decider.choosing_ns / sent] * sent
            window.dispatched += sent
        window.costs_ns[_KIND_OF[type(event)]].append(spent_ns)
        return commands

    def _happened(self, event: ev.Event, now: float, window: Window) -> None:
        if isinstance(event, ev.Arrived):
            window.submitted += 1
            self._arrive()
        elif isinstance(event, ev.FirstToken):
            job = self._by_id[event.request_id]
            usage = Usage(prompt_tokens=job.request.shape.prompt_tokens or 0, output_tokens=job.output_tokens)
            self._at(now + job.decode_s, ev.Finished(event.request_id, Outcome.COMPLETED, usage))
        elif isinstance(event, ev.Finished):
            del self._by_id[event.request_id]
            self._running[self._replica_of.pop(event.request_id)] -= 1

    def _carry_out(self, command: Command, now: float) -> None:
        if not isinstance(command, Dispatch):
            return
        self._received[command.replica_id] += 1
        self._running[command.replica_id] += 1
        self._replica_of[command.request_id] = command.replica_id
        self._at(now + self._by_id[command.request_id].prefill_s, ev.FirstToken(command.request_id))

    def _arrive(self) -> None:
        job = next(self._jobs)
        self._by_id[job.request.request_id] = job
        self._at(job.request.arrived_at, ev.Arrived(job.request))

    def _report(self, replica_id: str) -> ReplicaReport:
        # Places stand for the KV cache: what matters here is that reports come and are taken in.
        running = self._running[replica_id]
        return ReplicaReport(
            received=self._received[replica_id],
            waiting=0,
            running=running,
            kv_usage_ratio=min(0.9, running / self._fleet.places),
            tpot_s=_STEP_S,
        )

    def _at(self, time_s: float, event: ev.Event) -> None:
        heapq.heappush(self._timeline, (time_s, next(self._serial), event))


_KIND_OF: dict[type, str] = {
    ev.Arrived: "submit",
    ev.FirstToken: "first token",
    ev.Finished: "finish",
    ev.ReplicaReported: "report",
}
