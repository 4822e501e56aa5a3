"""The tuning endpoint: the observations that the tuner pulls, and the changes that it may make.

- `TuningEndpoint`: learned partitions (`LearnedQueues`) and tuned values, which the tuner sends; it pulls
  lengths and outcomes. All of it is soft state: if a tuner dies, the adopted values remain, and values on
  trial expire.
- `SchedulingMode`: the scheduled share of the traffic, and the latencies before and after each change of it.

`SchedulingMode`. A window lasts from one change to the next. Time to first token is measured from arrival at
the gateway; only streamed answers have one.

After an observation the share rises in steps. At each step, the scheduled requests are compared with those
that bypass the scheduler at the same time; at the last one, with those of the step before. If their first
tokens are slower, and not by chance, the step is undone, and tried again after a pause that doubles.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from time import time
from typing import Any, Protocol

import msgspec

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.events import ActiveShareChanged, Arrived, Event, FirstToken, PartitionChanged, Retuned
from serve_app.core.metrics.summary import first_token_figures
from serve_app.core.policies.length_queues import Partition
from serve_app.core.retuning import checked_retuning
from serve_app.core.routing.observed import compare_kinds
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving.scheduler.gauges import SUM, Figures, figure
from serve_app.serving.scheduler.journal import Entry, RequestHistory
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from serve_app.tuning.rollout import NO_OUTCOMES, Observation, Retune
from serve_app.tuning.search_space import value_at, with_values

# Windows, and samples of each part: at 20 requests/s, more than the last three minutes of it. About 5 MB.
_MAX_WINDOWS, _MAX_SAMPLES = 8, 4_000
# Expected prompt tokens, and seconds.
_Samples = deque[tuple[int, float]]
# Shares at which a rise stops, and for how many scheduled requests and seconds at least.
_STEPS, _STEP_REQUESTS, _STEP_S = (0.1, 0.25, 0.5, 1.0), 40, 10.0
# The same number of observed requests makes a comparison possible. Slower is beyond chance, and by this much.
_SLOWER_DEVIATIONS, _SLOWER_RATIO = 2.5, 1.1
_FIRST_PAUSE_S, _MAX_PAUSE_S = 60.0, 3_600.0

logger = logging.getLogger("ray.serve")


def _no_samples() -> _Samples:
    return deque(maxlen=_MAX_SAMPLES)


@dataclass(slots=True)
class _Window:
    """Time with one share; times in Unix seconds."""

    active_share: float
    since: float
    until: float | None = None
    scheduled: _Samples = field(default_factory=_no_samples)
    bypassed: _Samples = field(default_factory=_no_samples)

    def describe(self) -> dict[str, Any]:
        return {
            "mode": _mode(self.active_share),
            "active_share": self.active_share,
            "since": self.since,
            "until": self.until,
            "scheduled": first_token_figures(self.scheduled),
            "bypassed": first_token_figures(self.bypassed),
        }


def _mode(active_share: float) -> str:
    return "active" if active_share == 1 else "observe" if active_share == 0 else "partly active"


class ModeScheduler(Protocol):
    """Interface of the live scheduler that the mode uses."""

    core: Scheduler
    end_reason: str

    def feed(self, event: Event) -> None:
        """Handle an event in the core."""
        ...


class SchedulingMode:
    """Scheduled share, and the times to first token in the windows of the last shares.

    Attributes:
        target_share: the share that is reached in steps.
    """

    def __init__(self, scheduler: ModeScheduler) -> None:
        self._scheduler = scheduler
        self._windows = deque([_Window(self.active_share, time())], _MAX_WINDOWS)
        self.target_share = self.active_share
        # Bypassing requests to compare with, and whether the last step is still compared.
        self._observed: _Samples = _no_samples()
        self._is_judged = True
        self._pause_s, self._resume_at = _FIRST_PAUSE_S, 0.0

    def __repr__(self) -> str:
        return f"<SchedulingMode active_share={self.active_share:g}>"

    @property
    def active_share(self) -> float:
        """Share of the requests that is scheduled, from 0 to 1."""
        return self._scheduler.core.pass_through.active_share

    @property
    def obstacle(self) -> str:
        """Reason that scheduling cannot be measured now; empty while all requests are scheduled."""
        share = self.active_share
        return "" if share == 1 else f"{1 - share:.0%} of the requests are not scheduled (mode)"

    def change(self, active_share: float) -> None:
        """Change the scheduled share, in steps if there is an observation to compare with.

        Raises:
            SettingsError: the share is not from 0 to 1.
            ChannelError: this scheduler has ended.
        """
        if not 0 <= active_share <= 1:
            raise SettingsError(f"active_share must be from 0 to 1, got {active_share!r}")
        self.target_share, self._pause_s, self._resume_at = active_share, _FIRST_PAUSE_S, 0.0
        self._observed = self._windows[-1].bypassed
        self._is_judged = len(self._observed) < _STEP_REQUESTS or active_share < self.active_share
        self._set(active_share if self._is_judged else self._next_share)

    @property
    def _next_share(self) -> float:
        """The next step towards the target."""
        return min(self.target_share, next((step for step in _STEPS if step > self.active_share), 1.0))

    def _set(self, active_share: float) -> None:
        self._scheduler.feed(ActiveShareChanged(active_share))
        if self._scheduler.end_reason:
            raise ChannelError(f"this scheduler is not running: {self._scheduler.end_reason}")
        if active_share != self._windows[-1].active_share:
            now = self._windows[-1].until = time()
            self._windows.append(_Window(active_share, now))

    def _judge(self, window: _Window) -> None:
        """Go on to the next step, or undo this one, once enough requests show which."""
        if len(window.bypassed) >= _STEP_REQUESTS:
            self._observed = window.bypassed
        now, share = time(), window.active_share
        is_over = window is not self._windows[-1] or bool(self._scheduler.end_reason)
        is_early = now < max(self._resume_at, window.since + _STEP_S)
        if is_over or is_early or (share and len(window.scheduled) < _STEP_REQUESTS):
            return
        deviations, delay_s = compare_kinds(_by_size(self._observed), _by_size(window.scheduled))
        usual_s = median(seconds for _, seconds in self._observed)
        if deviations > _SLOWER_DEVIATIONS and delay_s > (_SLOWER_RATIO - 1) * usual_s:
            logger.warning(
                "event=share_undone active_share=%g delay_s=%.3f usual_s=%.3f pause_s=%g",
                *(share, delay_s, usual_s, self._pause_s),
            )
            self._resume_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            self._set(max((step for step in _STEPS if step < share), default=0.0))
        elif share < self.target_share:
            self._set(self._next_share)
        else:
            self._is_judged = True

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of first tokens."""
        return {FirstToken: self._on_first_token}

    def _on_first_token(self, entry: Entry) -> None:
        scheduled = entry.scheduled
        running = None if scheduled is None else scheduled.running
        if scheduled is not None and running is not None and running.started_at == entry.now:
            window, waited_s = self._windows[-1], entry.now - scheduled.request.arrived_at
            part = window.bypassed if running.bypassed else window.scheduled
            part.append((scheduled.estimate.expected_prompt_tokens, waited_s))
            if not self._is_judged:
                # Not now: the event that this entry records is still being observed.
                asyncio.get_running_loop().call_soon(self._judge, window)

    def describe(self) -> dict[str, Any]:
        """Return the share, and the times to first token of both parts.

        `measured` is of all windows in which a part of the traffic was not scheduled.
        """
        split = [window for window in self._windows if window.active_share < 1]
        return {
            "mode": _mode(self.active_share),
            "active_share": self.active_share,
            "target_share": self.target_share,
            "measured": {
                "scheduled": first_token_figures(chain(*(window.scheduled for window in split))),
                "bypassed": first_token_figures(chain(*(window.bypassed for window in split))),
            },
            "windows": [window.describe() for window in self._windows],
        }


def _by_size(samples: _Samples) -> dict[int, list[float]]:
    """Return the latest samples by the size of their prompts, to a factor of four."""
    by_size: dict[int, list[float]] = {}
    for tokens, seconds in list(samples)[-4 * _STEP_REQUESTS :]:
        by_size.setdefault(tokens.bit_length() // 2, []).append(seconds)
    return by_size


_KEPT = 10_000
"""Lengths retained between two pulls: ten seconds at 1,000 requests/s; 80 kB."""


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


class TunedScheduler(ModeScheduler, Protocol):
    """Interface of the live scheduler that the endpoint uses."""

    mode: SchedulingMode
    history: RequestHistory

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
    # Number of ended requests up to the last pull of outcomes.
    _ends: int = field(init=False, default=0)
    _incumbent: SchedulerSettings = field(init=False)
    _tuned: Mapping[str, float] = field(init=False, default_factory=dict)
    _trial_timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._incumbent = self.scheduler.core.settings

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler that records lengths."""
        return {Arrived: self._on_arrival}

    def _on_arrival(self, entry: Entry) -> None:
        if entry.scheduled is not None:
            self.queues.on_arrival(entry.scheduled.prefill_tokens)

    def observed(self, *, outcomes: bool = False) -> Observation:
        """Return the observations since the last call; outcomes are collected from their first request on."""
        self._is_pulled = True
        now, history, encoded = self.scheduler.now(), self.scheduler.history, NO_OUTCOMES
        if outcomes:
            history.is_pulled = True
            encoded = msgspec.msgpack.encode(history.outcomes_after(self._ends))
            self._ends = history.ends
        return Observation(
            incarnation=self.incarnation,
            lengths=self.queues.take(),
            at=now,
            completed_until=history.completed_until(now),
            outcomes=encoded,
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

    def figures(self, now: float) -> Iterator[Figures]:
        """Yield the metrics of learned queues, tuned values and the tuner."""
        text = "Number of learned length queues; 0 while the policy uses its initial ones."
        yield figure("ewsjf_length_queues", text, len(self.queues))
        text = "Time since the current length queues were learned."
        yield figure("ewsjf_partition_age_seconds", text, self.queues.age_s(now))
        tuned = Figures("ewsjf_tuned_value", "Current value of a tuned setting.", "setting")
        tuned.update({(path,): value for path, value in self._tuned.items()})
        yield tuned
        error = (self.document.get("twin") or {}).get("error") or {}
        text = "Last measured error of the twin: its mean latency over that of the engines, minus 1."
        errors = Figures("ewsjf_twin_error_ratio", text, "latency")
        errors.update({(latency,): error[f"{latency}_ratio"] for latency in ("ttft", "tpot") if error})
        yield errors
        counts = self.document.get("counts") or {"searches": None, "candidates": None, "decisions": {}}
        yield figure("ewsjf_tuner_searches", "Finished searches of the tuner.", counts["searches"], SUM)
        text = "Candidates that the tuner evaluated in its twin."
        yield figure("ewsjf_tuner_candidates", text, counts["candidates"], SUM)
        text = "Decisions of the tuner about candidates on trial in production."
        decisions = Figures("ewsjf_tuner_decisions", text, "decision", family=SUM)
        decisions.update({(decision,): count for decision, count in counts["decisions"].items()})
        yield decisions
        text = "1 while the tuner is frozen, by a command or after a failure: no trials."
        frozen = bool(self.frozen) if self.document.get("counts") else None
        yield figure("ewsjf_tuner_frozen", text, frozen)

    def stop(self) -> None:
        """Stop; the scheduler has ended."""
        self._cancel_trial_timer()

    def _end_trial(self, reason: str) -> None:
        if self._trial_timer is None:
            return
        self._cancel_trial_timer()
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
