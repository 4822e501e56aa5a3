"""Scripted servers that expose neither load nor limits, in simulated time, and two ways to use them.

A server begins a request when it has a free slot, in order of arrival. The first token comes after a drawn
time, and further tokens at a pace that may fall with the number of requests. A provider rejects requests
beyond its rate with 429 and `Retry-After`.

`Direct` is a client that chooses a server for each request on its arrival. `Scheduled` is the scheduler that
the live actor runs, with the events that gateways and watchers of such servers send.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core import events as ev
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.routing.replica import UNREPORTED_CONTEXT, ReplicaReport, ReplicaSpec
from serve_app.core.settings_base import settings
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import Phase, Timeline
from serve_app.request import Request, Usage

POOL = "all"
# One way, between the scheduler, a gateway and a server.
_LATENCY_S = 0.001
_REPORT_S = 0.2
# As the official SDKs do.
_RETRIES = 2


@settings
class ServerSettings:
    """A kind of server.

    Attributes:
        slots: requests that it serves at once; None for no limit.
        first_s: median time from the begin of a request to its first token.
        sigma: standard deviation of the logarithm of that time; 0 for a fixed one.
        outliers: share of the first tokens that take `outlier_s` longer.
        token_s: time per further token of a request that is alone.
        crowding: growth of that time with each other request.
        tokens_per_minute: a provider's limit on prompt and output tokens; None for none.
        concurrent: requests at once beyond which a provider answers 429; None for no limit.
        retry_after_s: `Retry-After` of a rejection for too many at once. Of one by the limit on tokens, it is
            the time after which the request fits.
    """

    slots: int | None = None
    first_s: float = 0.4
    sigma: float = 0.5
    outliers: float = 0.0
    outlier_s: float = 10.0
    token_s: float = 0.015
    crowding: float = 0.0
    tokens_per_minute: float | None = None
    concurrent: int | None = None
    retry_after_s: float = 1.0

    def service_s(self, output_tokens: float, others: float) -> float:
        """Return the mean time that a request takes beside others, once it has begun."""
        first_s = self.first_s * math.exp(self.sigma**2 / 2) + self.outliers * self.outlier_s
        return first_s + output_tokens * self.token_s * (1 + self.crowding * others)


@dataclass(slots=True)
class Job:
    """A request, with the answer that it will get, and its progress. Times in seconds."""

    request: Request
    prompt_tokens: int
    output_tokens: int
    rng_seed: int
    sent_at: float = 0.0
    first_at: float | None = None
    finished_at: float | None = None
    rejections: int = 0
    server: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token that the server sent, also if it is not streamed."""
        return None if self.first_at is None else self.first_at - self.request.arrived_at


class ScriptedServer:
    """One server.

    Args:
        slowness: factor on all times.
        on_first, on_end: called when a request has its first token, and when it has ended.
    """

    def __init__(
        self,
        name: str,
        plan: ServerSettings,
        slowness: float,
        timeline: Timeline,
        on_first: Callable[[Job], None],
        on_end: Callable[[Job], None],
    ) -> None:
        self.name = name
        self.plan = plan
        self.most_at_once = 0
        self._slowness = slowness
        self._timeline = timeline
        self._on_first, self._on_end = on_first, on_end
        self._waiting: deque[Job] = deque()
        self._busy = 0
        # Progress of all decoding requests in tokens, and a heap of (progress at the end, order, job).
        self._progress, self._progress_at = 0.0, 0.0
        self._decoding: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._wake: float | None = None
        self._tokens_left = (plan.tokens_per_minute or 0.0) / 60
        self._refilled_at = 0.0

    def rejection_s(self, job: Job) -> float | None:
        """Return the `Retry-After` of a rejected request, or None if it is accepted, and begins or waits."""
        if (retry_s := self._too_many(job)) is not None:
            return retry_s
        job.sent_at, job.server = self._timeline.now, self.name
        self._waiting.append(job)
        self.most_at_once = max(self.most_at_once, len(self._waiting) + self._busy)
        self._begin()
        return None

    def _too_many(self, job: Job) -> float | None:
        plan, now = self.plan, self._timeline.now
        if plan.concurrent is not None and self._busy >= plan.concurrent:
            return plan.retry_after_s
        if plan.tokens_per_minute is None:
            return None
        per_s = plan.tokens_per_minute / 60
        # Ten seconds of the limit may be used at once.
        self._tokens_left = min(10 * per_s, self._tokens_left + per_s * (now - self._refilled_at))
        self._refilled_at = now
        wanted = job.prompt_tokens + job.output_tokens
        if wanted > self._tokens_left:
            return max(0.1, (wanted - self._tokens_left) / per_s)
        self._tokens_left -= wanted
        return None

    def _begin(self) -> None:
        slots = self.plan.slots
        while self._waiting and (slots is None or self._busy < slots):
            job = self._waiting.popleft()
            self._busy += 1
            rng = random.Random(job.rng_seed)  # noqa: S311 - no secret
            seconds = self.plan.first_s * math.exp(rng.gauss(0.0, self.plan.sigma))
            if rng.random() < self.plan.outliers:
                seconds += self.plan.outlier_s
            at = self._timeline.now + seconds * self._slowness
            self._timeline.schedule(at, Phase.ENGINE, partial(self._first, job))

    def _first(self, job: Job) -> None:
        job.first_at = self._timeline.now
        self._advance()
        heapq.heappush(self._decoding, (self._progress + job.output_tokens - 1, next(self._order), job))
        self._on_first(job)
        self._schedule()

    def _advance(self) -> None:
        """Bring the progress to now."""
        now, decoding = self._timeline.now, len(self._decoding)
        if decoding:
            pace_s = self.plan.token_s * self._slowness * (1 + self.plan.crowding * (decoding - 1))
            self._progress += (now - self._progress_at) / pace_s
        self._progress_at = now

    def _schedule(self) -> None:
        if not self._decoding:
            return
        pace_s = self.plan.token_s * self._slowness * (1 + self.plan.crowding * (len(self._decoding) - 1))
        at = self._timeline.now + max(0.0, self._decoding[0][0] - self._progress) * pace_s
        self._wake = at
        self._timeline.schedule(at, Phase.ENGINE, partial(self._end_due, at))

    def _end_due(self, scheduled: float) -> None:
        if scheduled != self._wake:
            return
        self._advance()
        while self._decoding and self._decoding[0][0] <= self._progress + 1e-6:
            job = heapq.heappop(self._decoding)[2]
            job.finished_at = self._timeline.now
            self._busy -= 1
            self._on_end(job)
        self._begin()
        self._schedule()


@dataclass(slots=True)
class Direct:
    """A client that alternates between the servers, or sends to the one with the fewest requests.

    It retries a rejected request twice, after `Retry-After`, as the official SDKs do.

    Attributes:
        jobs: all requests, in the order of arrival.
    """

    jobs: Sequence[Job]
    plan: ServerSettings
    slowness: Sequence[float]
    least: bool
    timeline: Timeline = field(init=False, default_factory=Timeline)
    servers: dict[int, ScriptedServer] = field(init=False)
    _in_flight: list[int] = field(init=False)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._in_flight = [0] * len(self.slowness)
        self.servers = {
            number: ScriptedServer(
                str(number), self.plan, factor, self.timeline, lambda _job: None, partial(self._end, number)
            )
            for number, factor in enumerate(self.slowness)
        }

    def run(self) -> None:
        """Play all requests to their end."""
        arrivals = ((job.request.arrived_at, partial(self._send, job)) for job in self.jobs)
        self.timeline.schedule_all(Phase.ARRIVAL, arrivals)
        self.timeline.run()

    def _send(self, job: Job) -> None:
        count = len(self.servers)
        turns = [(self._turn + each) % count for each in range(count)]
        self._turn += 1
        number = min(turns, key=lambda each: self._in_flight[each]) if self.least else turns[0]
        retry_s = self.servers[number].rejection_s(job)
        if retry_s is None:
            self._in_flight[number] += 1
        elif job.rejections < _RETRIES:
            job.rejections += 1
            self.timeline.schedule(self.timeline.now + retry_s, Phase.ARRIVAL, partial(self._send, job))

    def _end(self, number: int, _job: Job) -> None:
        self._in_flight[number] -= 1


@dataclass(slots=True)
class Scheduled:
    """The scheduler in front of the servers.

    Attributes:
        max_num_seqs: configured limit of requests in flight; None for none.
        usage: whether servers count tokens in their answers.
        outcomes: number of requests by outcome.
    """

    jobs: Sequence[Job]
    plan: ServerSettings
    slowness: Sequence[float]
    settings: SchedulerSettings
    max_num_seqs: int | None = None
    usage: bool = True
    timeline: Timeline = field(init=False, default_factory=Timeline)
    scheduler: Scheduler = field(init=False)
    servers: dict[str, ScriptedServer] = field(init=False)
    outcomes: dict[Outcome, int] = field(init=False, default_factory=dict)
    _live: dict[str, Job] = field(init=False)
    _wake_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._live = {job.request.request_id: job for job in self.jobs}
        self.scheduler = Scheduler(self.settings)
        self.servers = {}
        for number, factor in enumerate(self.slowness):
            name = f"s{number}"
            self.servers[name] = ScriptedServer(
                name, self.plan, factor, self.timeline, self._first_token, self._end
            )
            spec = ReplicaSpec(
                replica_id=name,
                pool=POOL,
                max_model_len=UNREPORTED_CONTEXT,
                kv_tokens=None,
                max_num_seqs=self.max_num_seqs,
            )
            self._feed(ev.ReplicaJoined(spec))
            self._report(name)

    def run(self) -> None:
        """Play all requests to their end."""
        arrivals = (
            (job.request.arrived_at, partial(self._feed, ev.Arrived(job.request))) for job in self.jobs
        )
        self.timeline.schedule_all(Phase.ARRIVAL, arrivals)
        self.timeline.run()

    def _feed(self, event: ev.Event) -> None:
        for command in self.scheduler.handle(event, self.timeline.now):
            if isinstance(command, Dispatch):
                self._later(partial(self._reach, self._live[command.request_id], command.replica_id))
            elif isinstance(command, Conclude):
                outcome = command.conclusion.outcome
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
                self._live.pop(command.request_id, None)
        wake_at = self.scheduler.next_wakeup()
        if wake_at is not None and self._live and (self._wake_at is None or wake_at < self._wake_at):
            self._wake_at = wake_at
            at = max(wake_at, self.timeline.now)
            self.timeline.schedule(at, Phase.WAKE_UP, partial(self._wake_up, wake_at))

    def _wake_up(self, scheduled: float) -> None:
        if scheduled == self._wake_at:
            self._wake_at = None
            self._feed(ev.Woke())

    def _later(self, action: Callable[[], None]) -> None:
        self.timeline.schedule(self.timeline.now + _LATENCY_S, Phase.FEEDBACK, action)

    def _reach(self, job: Job, name: str) -> None:
        retry_s = self.servers[name].rejection_s(job)
        if retry_s is not None:
            job.rejections += 1
            failed = ev.DispatchFailed(
                job.request.request_id, name, ev.DispatchFailure.BUSY, retry_after_s=retry_s
            )
            self._later(partial(self._feed, failed))

    def _first_token(self, job: Job) -> None:
        if job.request.spec.streamed:
            self._later(partial(self._feed, ev.FirstToken(job.request.request_id)))

    def _end(self, job: Job) -> None:
        usage = Usage(prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens)
        finished = ev.Finished(job.request.request_id, Outcome.COMPLETED, usage if self.usage else None)
        self._later(partial(self._feed, finished))

    def _report(self, name: str) -> None:
        report = ReplicaReport(received=None, waiting=None, running=None, kv_usage_ratio=None)
        self._feed(ev.ReplicaReported(name, report))
        if self._live:
            self.timeline.schedule(self.timeline.now + _REPORT_S, Phase.REPORT, partial(self._report, name))
