"""A fleet's events fed to a decider, and what each event costs."""

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from experiments.dispatch.deciders import Decider
from experiments.dispatch.traffic import STEP_S, FleetTraffic, Job
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.routing.replica import ReplicaReport
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Command, Dispatch

KINDS = ("submit", "dispatch", "first token", "finish", "report")
"""Events, and the dispatcher's part of them."""


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
            tpot_s=STEP_S,
        )

    def _at(self, time_s: float, event: ev.Event) -> None:
        heapq.heappush(self._timeline, (time_s, next(self._serial), event))


_KIND_OF: dict[type, str] = {
    ev.Arrived: "submit",
    ev.FirstToken: "first token",
    ev.Finished: "finish",
    ev.ReplicaReported: "report",
}
