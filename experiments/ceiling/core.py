"""Cost of each event in the scheduling core, and the resulting limit of one processor core.

The fleet consists of engines that cost next to nothing to simulate, so that the scheduler's own cost can be
measured.

An engine computes one prompt after another, and decodes every sequence at one pace. It reports what a real
engine reports: received requests, requests that wait for prefill, and KV use. Lengths come from a trace;
times are those of an 8B model on one H100 according to its profile.
"""

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import scheduler_settings
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.request import Usage

POOLS = ("short", "long")
_CONTEXT_TOKENS = {"short": 8_192, "long": 32_768}
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
