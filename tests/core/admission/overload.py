"""Overload simulation: engines with batch slots, and clients that retry after their `Retry-After`."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.request import Request, Usage
from tests.builders import report, settings, spec

SLOTS = 8
PREFILL_S, DECODE_S = 0.0002, 0.02


@dataclass
class Engine:
    """Engine with SLOTS slots, a random pace per request, and a queue."""

    replica_id: str
    received: int = 0
    running: int = 0
    waiting: deque[Request] = field(default_factory=deque)


@dataclass
class Attempt:
    """One attempt of a client."""

    request: Request
    output_tokens: int
    number: int
    waited_s: float | None = None
    outcome: Outcome | None = None
    retry_after_s: float | None = None

    @property
    def accepted(self) -> bool:
        return self.retry_after_s is None


class OverloadSimulation:
    """Clients in front of a real scheduler.

    Args:
        retries: retries per client, each `late_s` after its `Retry-After`.
    """

    def __init__(
        self, *, replicas: int = 2, retries: int = 3, late_s: float = 0.02, **changes: object
    ) -> None:
        changes.setdefault("routing", RoutingSettings(pools=("short",)))
        self.scheduler = Scheduler(settings(**changes))
        self.retries, self.late_s = retries, late_s
        self.engines = {f"s{n}": Engine(f"s{n}") for n in range(replicas)}
        self.attempts: dict[str, Attempt] = {}
        self.now = 0.0
        self.most_waiting = 0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._wake_at = -1.0

    def capacity_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        return SLOTS * len(self.engines) / (PREFILL_S * prompt_tokens + DECODE_S * output_tokens)

    def run(self, arrivals: list[tuple[Request, int]], until: float) -> None:
        for engine in self.engines.values():
            self.feed(ev.ReplicaJoined(spec(engine.replica_id, max_num_seqs=SLOTS, kv_tokens=100_000)))
            self.report(engine)
        for request, output_tokens in arrivals:
            self.at(request.arrived_at, partial(self.arrive, request, output_tokens))
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), action))

    def feed(self, event: ev.Event) -> None:
        for command in self.scheduler.handle(event, self.now):
            self.execute(command)
        self.most_waiting = max(self.most_waiting, len(self.scheduler.queue))
        wake_at = self.scheduler.next_wakeup()
        if wake_at is not None and wake_at != self._wake_at:
            self._wake_at = wake_at
            self.at(max(wake_at, self.now), lambda: self.feed(ev.Woke()))

    def arrive(self, request: Request, output_tokens: int, number: int = 0) -> None:
        self.attempts[request.request_id] = Attempt(request, output_tokens, number)
        self.feed(ev.Arrived(request))

    def execute(self, command: Command) -> None:
        match command:
            case Dispatch():
                attempt = self.attempts[command.request_id]
                attempt.waited_s = command.queue_wait_s
                self.reach(self.engines[command.replica_id], attempt)
            case Conclude():
                attempt = self.attempts[command.request_id]
                attempt.outcome = command.conclusion.outcome
                attempt.retry_after_s = command.conclusion.retry_after_s
                if command.conclusion.retry_after_s is not None and attempt.number < self.retries:
                    self.retry(attempt, self.now + command.conclusion.retry_after_s + self.late_s)

    def retry(self, attempt: Attempt, at: float) -> None:
        old = attempt.request
        again = replace(
            old,
            submission=msgspec.structs.replace(old.submission, request_id=f"{old.request_id}+"),
            arrived_at=at,
            expires_at=at + old.expires_at - old.arrived_at,
        )
        self.at(at, lambda: self.arrive(again, attempt.output_tokens, attempt.number + 1))

    def reach(self, engine: Engine, attempt: Attempt) -> None:
        engine.received += 1
        engine.waiting.append(attempt.request)
        self.at(self.now, lambda: self.begin(engine))

    def begin(self, engine: Engine) -> None:
        while engine.waiting and engine.running < SLOTS:
            request = engine.waiting.popleft()
            engine.running += 1
            prompt_tokens = request.shape.prompt_tokens or 0
            first_at = self.now + PREFILL_S * prompt_tokens
            output_tokens = self.attempts[request.request_id].output_tokens
            self.at(first_at, partial(self.feed, ev.FirstToken(request.request_id)))
            self.at(first_at + DECODE_S * output_tokens, partial(self.finish, engine, request))

    def finish(self, engine: Engine, request: Request) -> None:
        engine.running -= 1
        self.begin(engine)
        usage = Usage(
            prompt_tokens=request.shape.prompt_tokens or 0,
            output_tokens=self.attempts[request.request_id].output_tokens,
        )
        self.feed(ev.Finished(request.request_id, Outcome.COMPLETED, usage))

    def report(self, engine: Engine) -> None:
        load = report(received=engine.received, waiting=len(engine.waiting), running=engine.running)
        self.feed(ev.ReplicaReported(engine.replica_id, load))
        self.at(self.now + 0.2, lambda: self.report(engine))


def poisson(rng: random.Random, per_s: float, until: float) -> list[float]:
    """Return Poisson arrival times."""
    times, now = [], 0.0
    while (now := now + rng.expovariate(per_s)) < until:
        times.append(now)
    return times
