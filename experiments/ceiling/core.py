"""The scheduler core alone: what each event costs, and what that makes of one core of a processor."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.ceiling.engines import POOLS, Engines
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import Scheduler
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import SimulatedRequest

KINDS = {
    ev.Arrived: "arrival",
    ev.FirstToken: "first token",
    ev.Finished: "finish",
    ev.ReplicaReported: "report",
    ev.Woke: "wake-up",
}


@dataclass(slots=True)
class Costs:
    """What was counted over a span of the fleet's time.

    Attributes:
        spent_ns: CPU time of each kind of event, in the order of events. Dispatches that an event lets go
            are in it.
        waits_s: queue wait of each dispatch.
        span_s: seconds of the fleet's time.
    """

    spent_ns: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS.values()})
    waits_s: list[float] = field(default_factory=list)
    refused: int = 0
    span_s: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that arrived."""
        return len(self.spent_ns["arrival"])


class CorePlay:
    """A scheduler with production settings, and a fleet that it serves."""

    def __init__(self, engines: Engines, *, policy: str, b_short_tokens: int) -> None:
        routing = RoutingSettings(pools=POOLS, b_short_tokens=b_short_tokens)
        self._engines = engines
        self.scheduler = Scheduler(scheduler_settings(policy, routing, {}))
        for spec in engines.specs():
            self.scheduler.handle(ev.ReplicaJoined(spec), 0.0)
        engines.begin()
        self.now = 0.0

    def play(self, requests: int) -> Costs:
        """Go on until so many more requests have arrived, each at its own time."""
        self._engines.expect_arrivals()
        costs, began = Costs(), self.now
        while costs.requests < requests:
            self._next(costs)
        costs.span_s = self.now - began
        return costs

    def play_backlog(self, waiting: int, requests: int) -> Costs:
        """Go on until so many more requests have arrived, each as soon as fewer than `waiting` wait."""
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
            # A wake-up that was due just before an event of the same instant counts from then.
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
                costs.refused += 1
                self._engines.drop(command.request_id)


def median_tokens(requests: Sequence[SimulatedRequest]) -> int:
    """The boundary under which half of all tokens are at home."""
    sizes = sorted((one.request.shape.prompt_tokens or 0) + one.output_tokens for one in requests)
    half, below = sum(sizes) / 2, 0
    for size in sizes:
        below += size
        if below >= half:
            break
    return size
