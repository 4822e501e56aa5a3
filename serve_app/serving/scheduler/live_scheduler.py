"""The live scheduler: feeds events to the core, executes its commands, and schedules its next wake-up.

There is one writer: all events pass through `feed`, on one event loop, and nothing awaits while the core's
state is in use. The clock is that of the loop's timers. If the core raises, its state is no longer trusted:
the live scheduler logs the error, closes every connection and requests its replacement. No request is lost,
because the gateways hold them and submit them to the next scheduler. Only the request that caused the error
ends with `failed`, if it was still waiting, because it might stop the next scheduler in the same way.
Observers of the journal are not part of the core: their errors are counted, and scheduling continues.
"""

import asyncio
import contextvars
import logging
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.commands import Command, Conclude, Dispatch, ReportStale, Revoke
from serve_app.core.decision_log import RunHeader
from serve_app.core.events import Arrived, Cancelled, Event, Finished, FirstToken, ReplicaReported, Woke
from serve_app.core.learned_state import restore_state
from serve_app.core.request import ScheduledRequest
from serve_app.errors import ChannelError
from serve_app.request import PriorityClass, RequestTimes
from serve_app.serving.cached_page import CachedPage
from serve_app.serving.channel.gateway_sessions import GatewaySessions, ReplicaRegistry
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.server import ChannelServer, Identity
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.process import precise_clock
from serve_app.serving.scheduler.documents import (
    MAX_SUB_QUEUES,
    RemoteEndpoints,
    queue_document,
    replica_documents,
)
from serve_app.serving.scheduler.gauges import (
    Figures,
    core_figures,
    cost_figures,
    figure,
    pool_figures,
    queue_figures,
    queued_figures,
    replica_figures,
)
from serve_app.serving.scheduler.journal import (
    ChangeLog,
    DecisionLogFile,
    DecisionLogSettings,
    Entry,
    Journal,
    RecentActivity,
    RequestHistory,
)
from serve_app.serving.scheduler.metrics import DecodeStalls, PrefixCheck, SchedulerMetrics
from serve_app.serving.scheduler.receipts import QueueWatch, Receipts
from serve_app.serving.scheduler.tuning_endpoint import SchedulingMode, TuningEndpoint
from serve_app.serving.scheduler.usage import UsageLedger

logger = logging.getLogger("ray.serve")
# Interval of checks for a newer incarnation.
_SUPERSEDED_CHECK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSchedulerOptions:
    """Options of a live scheduler besides the core's settings.

    Attributes:
        incarnation: claimed for this live scheduler only.
        newest_incarnation: returns the highest claimed incarnation; None if there can be no other.
        on_end: called once with the reason when the scheduler has ended for good and must be replaced.
        decision_log: None disables the recording of decisions.
        learned: learned state of an earlier scheduler; see `learned_state`.
        usage_ledger: counts usage by API key; None disables it.
        more_metrics: metrics of its process, which outlive it; they follow its own on the page.
        activity: recent activity to continue; None starts a new one.
        endpoints: states of remote endpoints to continue; None if none is known.
        tuner_after: see `TuningEndpoint`.
    """

    incarnation: int
    channel: ChannelSettings
    newest_incarnation: Callable[[], Awaitable[int]] | None = None
    on_end: Callable[[str], None] | None = None
    decision_log: DecisionLogSettings | None = None
    learned: Mapping[str, Any] | None = None
    more_metrics: CollectorRegistry | None = None
    usage_ledger: UsageLedger | None = None
    activity: RecentActivity | None = None
    endpoints: RemoteEndpoints | None = None
    tuner_after: int | None = None


class QueryHandler(Protocol):
    """Answers admins' queries."""

    async def answer(self, query: str, arguments: bytes) -> bytes:
        """Return the answer as JSON."""
        ...


class LiveScheduler:
    """A running scheduler: core, clock, connections and metrics.

    Attributes:
        core: the scheduler; others may read it, but only this object feeds it.
        end_reason: why it has ended; empty while it runs.
        tuner: interface towards its tuner.
        mode: the scheduled share of the traffic, and the latencies of both parts.
        history: its open and recently ended requests.
        receipts: receipts of these requests.
        activity: activity of the last minutes.
        endpoints: remote endpoints that are down.
        queries: answers admins' queries; None until set.
    """

    def __init__(self, settings: SchedulerSettings, options: LiveSchedulerOptions) -> None:
        self._settings = settings
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._clock = precise_clock(self._loop)
        self._now = self._clock()
        self.core = Scheduler(settings, now=self._now)
        if options.learned is not None:
            restore_state(self.core, options.learned)
        self.end_reason = ""
        self.queries: QueryHandler | None = None
        self._secrets = {role: secrets.token_urlsafe(32) for role in Role}
        self._metrics = SchedulerMetrics(settings.model, more=options.more_metrics)
        self._page = CachedPage(self._figures, self._metrics.exposition)
        self._gateways = GatewaySessions(self, options.channel.gateway_grace_s)
        self._replicas = ReplicaRegistry(self.feed, self._gateways.broadcast)
        timeouts = {priority: settings.queue_timeout_s.of(priority) for priority in PriorityClass}
        identity = Identity(
            secrets=self._secrets,
            incarnation=options.incarnation,
            queue_timeouts_s=timeouts,
        )
        self._server = ChannelServer(
            identity, options.channel, self._gateways, self._replicas, self._superseded
        )
        self._address: tuple[str, int] | None = None
        self._wakeup_timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._incarnation_task: asyncio.Task[None] | None = None
        self.tuner = TuningEndpoint(
            scheduler=self,
            model=settings.model,
            incarnation=options.incarnation,
            metrics=self._metrics,
            replicas=lambda: [spec for spec, _ in self._replicas.reports().values()],
            tuner_after=options.tuner_after,
        )
        self.mode = SchedulingMode(self)
        self.activity = options.activity or RecentActivity(self._clock)
        self.endpoints = options.endpoints or RemoteEndpoints()
        costs = self.core.prefill_costs
        self.history = RequestHistory(lambda pool, tokens: costs.of(pool).seconds(tokens), since=self._now)
        send, count = self._gateways.send_outlooks, self._metrics.on_calibration_errors
        self._outlook = QueueWatch(self.core, self.now, send, count)
        self.receipts = Receipts(self.core, self.history, self._outlook)
        self._log = self._open_log()
        self._journal = Journal(self._metrics.on_observer_error)
        if self._log is not None:
            self._journal.subscribe(self._log)
        self._journal.subscribe(self.tuner, self.mode, self.activity, self.history)
        counted, errors = self._metrics.prefix_tokens, self._metrics.prefix_errors
        self._prefix_check = PrefixCheck(settings.model, counted, errors)
        stalls = DecodeStalls(settings.model, self.history, self._metrics.decode_gaps)
        self._journal.subscribe(self._metrics, self._prefix_check, self._outlook, stalls)
        self._journal.subscribe(ChangeLog(settings.model))
        if options.usage_ledger is not None:
            self._journal.subscribe(options.usage_ledger)

    def __repr__(self) -> str:
        state = f"ended: {self.end_reason}" if self.end_reason else "running"
        parts = (self._gateways, self._replicas, self.core)
        return f"<LiveScheduler {self._options.incarnation} {state}, {', '.join(map(repr, parts))}>"

    async def start(self, host: str) -> None:
        """Listen on `host`, at a configured port.

        Raises:
            PortError: no port is available.
        """
        port = await self._server.start(host)
        self._address = host, port
        if self._options.newest_incarnation is not None:
            self._incarnation_task = self._loop.create_task(
                self._watch_incarnations(self._options.newest_incarnation), context=contextvars.Context()
            )
        logger.info(
            "event=scheduler_started model=%s incarnation=%d host=%s port=%d",
            self._settings.model,
            self._options.incarnation,
            host,
            port,
        )

    def stop(self, reason: str = "stopped") -> None:
        """Stop scheduling, and close every connection after its pending messages."""
        if self.end_reason:
            return
        self.end_reason = reason
        for timer in (self._wakeup_timer, self._incarnation_task):
            if timer is not None:
                timer.cancel()
        self.tuner.stop()
        self._outlook.stop()
        self._server.stop(reason)
        if self._log is not None:
            self._log.close()

    def flush(self) -> None:
        """Write the buffered decisions."""
        if self._log is not None:
            self._log.flush()

    def endpoint(self, role: Role) -> SchedulerEndpoint:
        """Return the address of this scheduler and the secret of a role.

        Raises:
            ChannelError: it has not started, or has ended.
        """
        if self._address is None or self.end_reason:
            raise ChannelError(f"this scheduler is not running: {self.end_reason or 'not started'}")
        host, port = self._address
        secret = self._secrets[role]
        return SchedulerEndpoint(host=host, port=port, secret=secret, incarnation=self._options.incarnation)

    def status(self) -> dict[str, Any]:
        """Return the state of the scheduler, for operators."""
        return {
            "model": self._settings.model,
            "incarnation": self._options.incarnation,
            "ended": self.end_reason,
            "gateways": self._gateways.connected_count,
            "queues": self.tuner.queues.describe(self.now()),
            "waiting": {priority.value: n for priority, n in self._waiting().items()},
            "waiting_by_pool": self.core.queue.waiting_by_home(),
            "predictions": self._metrics.predictions(self.now()),
            "tuner": self.tuner.status(),
            "mode": self.mode.describe(),
            "prefix": self._prefix_check.describe(self.now()),
            "pools": list(self._settings.routing.pools),
            "observer_errors": self._journal.errors,
            "decision_log_ended": self._log.end_reason if self._log is not None else "",
            "replicas": replica_documents(self.core, self._replicas.reports(), self.now()),
            "endpoints": self.endpoints.documents(),
        }

    def queue(self, most: int = MAX_SUB_QUEUES) -> dict[str, Any]:
        """Return what is queued, for how long and why, with at most `most` sub-queues."""
        found = queue_document(self.core, self.now(), most)
        return {**found, "grown_from": self.activity.grown_from()}

    # Called by the sessions and the registry.

    def feed(self, event: Event) -> None:
        """Handle an event in the core, execute its commands, and schedule the next wake-up."""
        if self.end_reason:
            return
        now = self._now if isinstance(event, Arrived) else self.now()  # an arrival was stamped just before
        try:
            entry = self._handle(event, now)
            entry.requests = [self._execute(command, event) for command in entry.commands]
            self._schedule_wakeup()
            ended = self._gateways.on_report(event) if isinstance(event, ReplicaReported) else ()
        except Exception as error:  # noqa: BLE001 - a fault of any kind in the core ends this scheduler
            self._core_failed(event, error)
        else:
            self._journal.append(entry)
            for request_id in ended:
                self.feed(Cancelled(request_id))

    def now(self) -> float:
        """Return the time of the loop's timers, made monotonic, as the core requires."""
        self._now = max(self._now, self._clock())
        return self._now

    def queue_timeout_s(self, priority: PriorityClass) -> float:
        """Return the default queue timeout of a class, in seconds."""
        return self._settings.queue_timeout_s.of(priority)

    def watch(self, request_id: str) -> None:
        """Send updates of a waiting request's outlook to its gateway."""
        self._observe(self._outlook, self._outlook.watch, request_id)

    def is_registered(self, replica_id: str) -> bool:
        """Return whether the replica is connected; pending changes are sent to the gateways first."""
        self._replicas.publish_changes()
        return replica_id in self._replicas

    def on_late_times(self, request_id: str, times: RequestTimes) -> None:
        """Add times that a gateway reports for a request that ended in the queue."""
        self._observe(self.history, self.history.on_late_times, request_id, times)

    async def exposition(self) -> str:
        """Return the recently cached metrics in the Prometheus text format."""
        return await self._page.text()

    async def answer(self, query: str, arguments: bytes) -> bytes:
        """Answer an admin's query as JSON.

        Raises:
            ChannelError: `queries` is not set.
        """
        if self.queries is None:
            raise ChannelError("this scheduler does not accept queries")
        return await self.queries.answer(query, arguments)

    # Internals.

    def _handle(self, event: Event, now: float) -> Entry:
        """Handle an event in the core, and look up its request."""
        core, scheduled = self.core, None
        began = perf_counter()
        commands = core.handle(event, now)
        took_s = perf_counter() - began
        match event:
            case Arrived():
                scheduled = core.find(event.request.request_id)
            case FirstToken():
                scheduled = core.find(event.request_id)
            case Finished():
                scheduled = core.ended.get(event.request_id)
        return Entry(core, now, event, commands, scheduled, took_s=took_s)

    def _waiting(self) -> Counter[PriorityClass]:
        """Return the number of queued requests by class."""
        return Counter(each.request.priority for each in self.core.requests.values() if each.queued)

    async def _figures(self) -> list[Figures]:
        core, now, names = self.core, self.now(), self._metrics.names
        stale = sum(state.joined and state.reports.stale for state in core.ledger)
        text = "Incarnation of the scheduler; each new scheduler has a higher one."
        return [
            figure("ewsjf_scheduler_incarnation", text, self._options.incarnation),
            *queued_figures(core),
            figure("ewsjf_replicas_stale", "Replicas whose load report is too old.", stale),
            figure("ewsjf_gateways_connected", "Gateways connected.", self._gateways.connected_count),
            *replica_figures(core, self._replicas.reports()),
            *core_figures(core),
            *queue_figures(core, now, names),
            *pool_figures(core, now),
            *cost_figures(core, names),
            self._metrics.prediction_errors(now),
            *self.tuner.figures(now),
            self.endpoints.figures(),
        ]

    def _execute(self, command: Command, event: Event) -> ScheduledRequest | None:
        """Execute a command, and return its request for the journal."""
        match command:
            case Dispatch():
                # A grant refers to the replica table, and must follow it on the connection.
                self._replicas.publish_changes()
                scheduled = self.core.requests[command.request_id]
                self._gateways.grant(command, scheduled.request)
                return scheduled
            case Conclude():
                self._gateways.conclude(command, event)
                return self.core.ended[command.request_id]
            case Revoke():
                self._gateways.revoke(command)
            case ReportStale(replica_id=replica_id):
                self._replicas.on_stale(replica_id)
        # Others are handled by subscribers of the journal.
        return None

    def _schedule_wakeup(self) -> None:
        """Schedule a timer at or before the core's next wake-up; `_wake` reschedules one that fires early."""
        wakeup_at = self.core.next_wakeup()
        if wakeup_at is not None and wakeup_at < self._timer_at:
            if self._wakeup_timer is not None:
                self._wakeup_timer.cancel()
            self._timer_at = wakeup_at
            self._wakeup_timer = self._loop.call_at(wakeup_at, self._wake)

    def _wake(self) -> None:
        due, self._wakeup_timer, self._timer_at = self._timer_at, None, math.inf
        wakeup_at = self.core.next_wakeup()
        if wakeup_at is None:
            return
        if wakeup_at > due:
            self._schedule_wakeup()
            return
        # The loop may call slightly early, by the resolution of its clock.
        self._now = max(self._now, due)
        self.feed(Woke())

    def _observe(self, observer: object, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - as in the journal
            self._journal.on_failure(observer, error)

    def _core_failed(self, event: Event, error: Exception) -> None:
        logger.error("event=core_failed on=%r", event, exc_info=error)
        self._metrics.on_core_failure()
        self._gateways.reject_failed(event, f"the scheduler failed on this request: {error}")
        self._end(f"the core failed on {type(event).__name__}: {error!r}")

    def _superseded(self, by: int) -> None:
        logger.warning("event=superseded incarnation=%d by=%d", self._options.incarnation, by)
        self._end(f"incarnation {self._options.incarnation} is superseded by {by}")

    def _end(self, reason: str) -> None:
        if not self.end_reason:
            self.stop(reason)
            if self._options.on_end is not None:
                self._options.on_end(reason)

    async def _watch_incarnations(self, newest: Callable[[], Awaitable[int]]) -> None:
        """Detect a newer scheduler even if no peer reports it."""
        while True:
            await asyncio.sleep(_SUPERSEDED_CHECK_S)
            try:
                number = await newest()
            except Exception as error:  # noqa: BLE001 - the store is unavailable; peers report it, too
                logger.warning("event=incarnation_check_failed reason=%r", error)
                continue
            if number > self._options.incarnation:
                self._superseded(number)
                return

    def _open_log(self) -> DecisionLogFile | None:
        log_settings = self._options.decision_log
        if log_settings is None:
            return None
        path = Path(log_settings.path.replace("{incarnation}", str(self._options.incarnation)))
        header = RunHeader(
            settings=self._settings,
            now=self._now,
            learned=self._options.learned,
            run={"incarnation": self._options.incarnation},
        )
        return DecisionLogFile(path, log_settings.max_events, header)
