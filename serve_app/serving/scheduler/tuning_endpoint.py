"""The tuning endpoint: the observations that the tuner pulls, and the changes that it may make.

Learned partitions (`LearnedQueues`) and tuned values are sent by the tuner, which pulls lengths and outcomes.
All of it is soft state: if a tuner dies, the adopted values remain, and values on trial expire.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.events import Arrived, Event, PartitionChanged, Retuned
from serve_app.core.policies.length_queues import Partition
from serve_app.core.retuning import checked_retuning
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving.scheduler.gauges import SUM, Figures, figure
from serve_app.serving.scheduler.journal import Entry
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from serve_app.serving.scheduler.scheduling_mode import SchedulingMode
from serve_app.tuning.outcome_window import OutcomeWindow, Row
from serve_app.tuning.rollout import Retune
from serve_app.tuning.search_space import value_at, with_values

_KEPT = 10_000
"""Lengths retained between two pulls: ten seconds at 1,000 requests/s; 80 kB."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Result of a pull.

    Attributes:
        incarnation: of the answering scheduler; a new one has no earlier updates.
        lengths: estimated prompt tokens of the requests admitted since the last pull.
        at: now, on the scheduler's clock, as are all times here.
        completed_until: arrival of the oldest open request; `at` if none is open.
        outcomes: requests concluded since the last pull, if requested.
        replicas: connected replicas, if outcomes were requested.
        settings: settings in effect, without values on trial, if outcomes were requested.
        frozen: why no trials are allowed; empty if they are.
    """

    incarnation: int
    lengths: list[int]
    at: float = 0.0
    completed_until: float = 0.0
    outcomes: list[Row] = field(default_factory=list)
    replicas: list[ReplicaSpec] = field(default_factory=list)
    settings: SchedulerSettings | None = None
    frozen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionUpdate:
    """A partition to apply, with its origin.

    Attributes:
        reason: learned; or restored, if this scheduler did not have the current partition.
        lengths: number of lengths that it was learned from.
        distance: from the previous partition; see `tuning.strategic_loop.partition_distance`.
        age_s: time since it was learned.
    """

    partition: Partition
    reason: str
    lengths: int
    distance: float
    age_s: float


class LearnedQueues:
    """Buffer of lengths for the tuner, and the current partition; None while the initial queues are used."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_KEPT)
        self.update: PartitionUpdate | None = None
        self._learned_at = 0.0

    def __len__(self) -> int:
        """Return the number of learned queues."""
        return len(self.update.partition) if self.update is not None else 0

    @property
    def buffered(self) -> int:
        """Number of lengths that the tuner has not pulled."""
        return len(self._lengths)

    def on_arrival(self, prompt_tokens: int) -> None:
        """Buffer a length for the next pull; when full, the oldest is dropped."""
        self._lengths.append(prompt_tokens)

    def take(self) -> list[int]:
        """Return and clear the buffered lengths, the oldest first."""
        taken = list(self._lengths)
        self._lengths.clear()
        return taken

    def on_change(self, update: PartitionUpdate, now: float) -> None:
        """Record that `update` was applied."""
        self.update, self._learned_at = update, now - update.age_s

    def age_s(self, now: float) -> float | None:
        """Return the time since the current partition was learned; None without one."""
        return None if self.update is None else now - self._learned_at

    def describe(self, now: float) -> dict[str, Any]:
        """Return the number, age and origin of the learned queues."""
        update = self.update
        return {
            "learned": len(self),
            "age_s": self.age_s(now),
            "reason": update.reason if update is not None else None,
            "lengths": update.lengths if update is not None else None,
            "distance": update.distance if update is not None else None,
        }


class TunedScheduler(Protocol):
    """Interface of the live scheduler that the endpoint uses."""

    core: Scheduler
    end_reason: str
    mode: SchedulingMode

    def feed(self, event: Event) -> None:
        """Handle an event in the core."""
        ...

    def now(self) -> float:
        """Return the time on the scheduler's clock."""
        ...


@dataclass(slots=True, eq=False)
class TuningEndpoint:
    """Interface of one scheduler towards its tuner.

    Args:
        replicas: returns the connected replicas.
        tuner_after: number of requests after which the tuner starts; None if the scheduler does not start it.

    Attributes:
        queues: learned length queues.
        document: last state document of the tuner.
        frozen: why no trials are allowed; empty if they are.
    """

    scheduler: TunedScheduler
    model: str
    incarnation: int
    metrics: SchedulerMetrics
    replicas: Callable[[], list[ReplicaSpec]]
    tuner_after: int | None = None
    queues: LearnedQueues = field(init=False, default_factory=LearnedQueues)
    document: Mapping[str, Any] = field(init=False, default_factory=dict)
    frozen: str = field(init=False, default="")
    _is_pulled: bool = field(init=False, default=False)
    # None until a tuner requests outcomes, so that they cost nothing without one.
    _outcomes: OutcomeWindow | None = field(init=False, default=None)
    _incumbent: SchedulerSettings = field(init=False)
    _tuned: Mapping[str, float] = field(init=False, default_factory=dict)
    _trial_timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._incumbent = self.scheduler.core.settings

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handlers that record lengths and, if requested, outcomes."""
        return {Arrived: self._on_arrival, Entry: self._on_event}

    def _on_arrival(self, entry: Entry) -> None:
        if entry.scheduled is not None:
            self.queues.on_arrival(entry.scheduled.prefill_tokens)

    def _on_event(self, entry: Entry) -> None:
        if self._outcomes is not None:
            if isinstance(entry.event, Arrived) and entry.scheduled is not None:
                self._outcomes.on_arrival(entry.scheduled)
            self._outcomes.on_event(entry.event, entry.commands, entry.now)

    def observed(self, *, outcomes: bool = False) -> Observed:
        """Return the observations since the last call; outcomes are collected from their first request on."""
        self._is_pulled = True
        if outcomes and self._outcomes is None:
            self._outcomes = OutcomeWindow()
        now, window = self.scheduler.now(), self._outcomes
        return Observed(
            incarnation=self.incarnation,
            lengths=self.queues.take(),
            at=now,
            completed_until=now if window is None else window.completed_until(now),
            outcomes=window.take() if outcomes and window is not None else [],
            replicas=self.replicas() if outcomes else [],
            settings=self._incumbent if outcomes else None,
            # Trials show nothing while part of the traffic bypasses scheduling.
            frozen=self.frozen or self.scheduler.mode.obstacle,
        )

    @property
    def needs_tuner(self) -> bool:
        """True if a tuner runs, or has to be started."""
        return self._is_pulled or self._awaited_requests == 0

    @property
    def _awaited_requests(self) -> int | None:
        """Requests until the tuner starts; None if the scheduler does not start it."""
        if self.tuner_after is None:
            return None
        return max(0, min(self.tuner_after, _KEPT) - self.queues.buffered)

    def apply_partition(self, update: PartitionUpdate) -> None:
        """Apply a learned partition; waiting requests are queued again.

        Raises:
            ChannelError: this scheduler has ended.
        """
        self.scheduler.feed(PartitionChanged(update.partition))
        self._check_alive()
        self.queues.on_change(update, self.scheduler.now())
        self.metrics.on_partition_change(update.reason)
        logger.info(
            "event=partition_changed model=%s incarnation=%d reason=%s queues=%d shortest=%d longest=%d "
            "lengths=%d distance=%.3f age_s=%.0f",
            self.model,
            self.incarnation,
            update.reason,
            len(update.partition),
            update.partition.intervals[0].min_tokens,
            update.partition.intervals[-1].max_tokens,
            update.lengths,
            update.distance,
            update.age_s,
        )

    def retune(self, order: Retune) -> None:
        """Apply tuned values; waiting requests keep their places.

        Raises:
            SettingsError: a setting is unknown, its value is invalid, or it cannot change in a running
                scheduler. Nothing changes then.
            ChannelError: this scheduler has ended, or tuning is frozen.
        """
        if self.frozen and order.valid_s is not None:
            raise ChannelError(f"tuning is frozen: {self.frozen}")
        settings = with_values(self._incumbent, order.values)
        try:
            checked_retuning(self.scheduler.core.settings, settings)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        self._cancel_trial_timer()
        self._apply(settings, order.values, order.reason)
        self._check_alive()
        if order.valid_s is None:
            self._incumbent = settings
        else:
            loop = asyncio.get_running_loop()
            # In an empty context, because tasks of the grants that follow must not belong to this call.
            context = contextvars.Context()
            self._trial_timer = loop.call_later(
                order.valid_s, self._end_trial, "its time limit was reached", context=context
            )

    def freeze(self, reason: str) -> None:
        """Roll back the trial, and reject further ones until `thaw`."""
        self.frozen = reason or "by command"
        self._end_trial("tuning was frozen")
        logger.info("event=tuning_frozen model=%s reason=%r", self.model, self.frozen)

    def thaw(self) -> None:
        """Allow trials again."""
        self.frozen = ""
        logger.info("event=tuning_thawed model=%s", self.model)

    def store_document(self, document: Mapping[str, Any]) -> None:
        """Store the tuner's state document."""
        self.document = document

    def status(self) -> dict[str, Any]:
        """Return the state of the tuner, for operators."""
        document = dict(self.document) if self.document else {"mode": "off", "state": self._idle_state()}
        if self.frozen:
            document["state"] = f"frozen: {self.frozen}"
        return {**document, "values": dict(self._tuned), "frozen": self.frozen}

    def _idle_state(self) -> str:
        awaited = 0 if self._is_pulled else self._awaited_requests
        return f"starts after {awaited} more requests" if awaited else "no values are tuned"

    def figures(self, now: float) -> list[Figures]:
        """Return the metrics of learned queues, tuned values and the tuner."""
        error = (self.document.get("twin") or {}).get("error") or {}
        counts = self.document.get("counts") or {"searches": None, "candidates": None, "decisions": {}}
        return [
            figure(
                "ewsjf_length_queues",
                "Number of learned length queues; 0 while the policy uses its initial ones.",
                len(self.queues),
            ),
            figure(
                "ewsjf_partition_age_seconds",
                "Time since the current length queues were learned.",
                self.queues.age_s(now),
            ),
            Figures(
                "ewsjf_tuned_value",
                "Current value of a tuned setting.",
                ("setting",),
                {(path,): value for path, value in self._tuned.items()},
            ),
            Figures(
                "ewsjf_twin_error_ratio",
                "Last measured error of the twin: its mean latency over that of the engines, minus 1.",
                ("latency",),
                {(latency,): error[f"{latency}_ratio"] for latency in ("ttft", "tpot") if error},
            ),
            figure("ewsjf_tuner_searches", "Finished searches of the tuner.", counts["searches"], SUM),
            figure(
                "ewsjf_tuner_candidates",
                "Candidates that the tuner evaluated in its twin.",
                counts["candidates"],
                SUM,
            ),
            Figures(
                "ewsjf_tuner_decisions",
                "Decisions of the tuner about candidates on trial in production.",
                ("decision",),
                {(decision,): count for decision, count in counts["decisions"].items()},
                SUM,
            ),
            figure(
                "ewsjf_tuner_frozen",
                "1 while the tuner is frozen, by a command or after a failure: no trials.",
                bool(self.frozen) if self.document.get("counts") else None,
            ),
        ]

    def stop(self) -> None:
        """Stop; the scheduler has ended."""
        self._cancel_trial_timer()

    def _end_trial(self, reason: str) -> None:
        if self._trial_timer is None:
            return
        self._cancel_trial_timer()
        if not self.scheduler.end_reason:
            values = {path: float(value_at(self._incumbent, path)) for path in self._tuned}
            self._apply(self._incumbent, values, reason)

    def _apply(self, settings: SchedulerSettings, values: Mapping[str, float], reason: str) -> None:
        self.scheduler.feed(Retuned(settings))
        self._tuned = dict(values)
        self.metrics.on_retuning()
        text = " ".join(f"{path}={value:g}" for path, value in values.items())
        logger.info(
            "event=retuned model=%s incarnation=%d reason=%r %s", self.model, self.incarnation, reason, text
        )

    def _cancel_trial_timer(self) -> None:
        if self._trial_timer is not None:
            self._trial_timer.cancel()
            self._trial_timer = None

    def _check_alive(self) -> None:
        if self.scheduler.end_reason:
            raise ChannelError(f"this scheduler is not running: {self.scheduler.end_reason}")
