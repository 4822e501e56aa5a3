"""Recordings of the traffic around one request, for replays, and captures of recent traffic.

A recording begins with the busy period: the first arrival since which the model has always had work. If that
is too long ago, it begins later, and includes requests that were already running. It ends with the busy
period, or some time after the request. A replay starts with the surroundings of that time: fleet, length
queues, settings and learned state. Changes of these are recorded as they occur; learned state is recorded at
most once per minute, when a request arrives.

A capture is a trace of the requests of the last minutes, with lengths and times but without text. Its lines
have the format of Mooncake's traces, which other tools read. Tenants have pseudonyms that are stable within a
process. Hashes of prompts are omitted, because they would confirm a guessed prompt.
"""

import hashlib
import secrets
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.events import (
    Arrived,
    PartitionChanged,
    ReplicaJoined,
    ReplicaLost,
    ReplicaReported,
    Retuned,
)
from serve_app.core.learned_state import learned_state
from serve_app.core.policies.length_queues import Partition
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import Outcome
from serve_app.request import KeyTerms, Request, Submission
from serve_app.serving.scheduler.history import HistoryRecord, RequestHistory
from serve_app.serving.scheduler.journal import Entry
from serve_app.tuning.counterfactuals.recording import RecordedChange, RecordedRequest, Recording

_SALT = secrets.token_bytes(16)


def captured(requests: Iterable[HistoryRecord]) -> list[dict[str, Any]]:
    """Return a line for each completed request whose tokens were counted by its engine, by arrival."""
    counted = [
        (known, known.gateway_request.usage)
        for known in requests
        if known.conclude is not None
        and known.conclude.conclusion.outcome is Outcome.COMPLETED
        and known.gateway_request.usage is not None
    ]
    counted.sort(key=lambda pair: pair[0].arrived_at)
    return [
        {
            "timestamp": round((known.arrived_at - counted[0][0].arrived_at) * 1e3, 3),
            "input_length": usage.prompt_tokens,
            "output_length": usage.output_tokens,
            "hash_ids": [],
            "tenant": pseudonym(known.gateway_request.tenant),
            "priority": known.gateway_request.priority.value,
        }
        for known, usage in counted
    ]


def pseudonym(tenant: str) -> str:
    """Return a pseudonym of a tenant, stable for the life of this process."""
    return "t" + hashlib.blake2b(tenant.encode(), key=_SALT, digest_size=6).hexdigest()


# With a thousand tenants, a learned state has some megabytes.
LEARNED_EVERY_S = 60.0


@dataclass(slots=True)
class SurroundingsState:
    """Settings, partition and fleet at some time; times of changes are on the scheduler's clock."""

    settings: SchedulerSettings
    partition: Partition | None = None
    fleet: dict[str, ReplicaSpec] = field(default_factory=dict)

    def apply(self, change: RecordedChange) -> None:
        """Apply a change."""
        if change.joined is not None:
            self.fleet[change.joined.replica_id] = change.joined
        elif change.left is not None:
            self.fleet.pop(change.left, None)
        elif change.partition is not None:
            self.partition = change.partition
        elif change.settings is not None:
            self.settings = change.settings

    def copy(self) -> "SurroundingsState":
        """Return a copy."""
        return SurroundingsState(self.settings, self.partition, dict(self.fleet))


class RecordedSurroundings:
    """Recorded settings, partition, fleet and learned state; single changes are retained for `kept_s`."""

    def __init__(self, core: Scheduler, kept_s: float) -> None:
        self._core, self._kept_s = core, kept_s
        self._oldest = SurroundingsState(core.settings)
        self._changes: deque[RecordedChange] = deque()
        self._learned: deque[tuple[float, Mapping[str, Any]]] = deque()
        self._open: set[str] = set()

    def __repr__(self) -> str:
        return f"<RecordedSurroundings {len(self._changes)} changes, {len(self._learned)} states>"

    def on_entry(self, entry: Entry) -> None:
        """Record a change, if the event is one."""
        now = entry.now
        match entry.event:
            case Arrived():
                if not self._learned or now >= self._learned[-1][0] + LEARNED_EVERY_S:
                    self._learned.append((now, learned_state(self._core)))
                    self._forget(now - self._kept_s)
            case ReplicaReported(replica_id=replica_id, report=report):
                # A draining replica stays connected until its last answer.
                if report.draining and replica_id in self._open:
                    self._open.discard(replica_id)
                    self._changes.append(RecordedChange(at_s=now, left=replica_id))
            case ReplicaJoined(spec=spec):
                self._open.add(spec.replica_id)
                self._changes.append(RecordedChange(at_s=now, joined=spec))
            case ReplicaLost(replica_id=replica_id):
                if replica_id in self._open:
                    self._open.discard(replica_id)
                    self._changes.append(RecordedChange(at_s=now, left=replica_id))
            case PartitionChanged(partition=partition):
                self._changes.append(RecordedChange(at_s=now, partition=partition))
            case Retuned(settings=settings):
                self._changes.append(RecordedChange(at_s=now, settings=settings))
            case _:
                pass

    def at(self, time: float) -> tuple[SurroundingsState, list[RecordedChange]]:
        """Return the surroundings at a time, and the changes since."""
        standing, later = self._oldest.copy(), list[RecordedChange]()
        for change in self._changes:
            if change.at_s <= time:
                standing.apply(change)
            else:
                later.append(change)
        return standing, later

    def learned_at(self, time: float) -> Mapping[str, Any]:
        """Return the learned state at a time, or else the oldest recorded one, or else the current one."""
        if not self._learned:
            return learned_state(self._core)
        known = [state for at, state in self._learned if at <= time]
        return known[-1] if known else self._learned[0][1]

    def _forget(self, before: float) -> None:
        while self._changes and self._changes[0].at_s < before:
            self._oldest.apply(self._changes.popleft())
        while len(self._learned) > 1 and self._learned[1][0] < before:
            self._learned.popleft()


LEAD_S = 180.0
"""Longest time before the request at which a recording begins."""
MAX_BEFORE, MAX_AFTER = 3_000, 1_000
"""Maximum requests before and after the one in question, because they are replayed many times."""
_AFTERWARDS_S = 30.0
_EARLIER = 500
_LATENCY_S = 0.002
# Requests per part of the work: a few milliseconds.
_DESCRIBED = 250


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times of the engines, with their source, as in a recording."""

    by_pool: Mapping[str, Mapping[str, float]]
    source: str


def known_step_times(tuner: Mapping[str, Any], profiles: Mapping[str, StepTimeModel]) -> StepTimes:
    """Return the step times in the tuner's document, or else those of profiles."""
    twin = tuner.get("twin") or {}
    if twin.get("engines"):
        return StepTimes(twin["engines"], "fitted by the tuner")
    # Latency to the engine and back, as simulations assume it.
    known = {pool: {"latency_s": _LATENCY_S, **asdict(each)} for pool, each in profiles.items()}
    return StepTimes(known, "those of the profile" if known else "")


@dataclass(frozen=True, slots=True)
class _Minutes:
    """The requests of a recording that begins at `at`, and `earlier` ones that are not part of it."""

    at: float
    begins_idle: bool
    requests: list[HistoryRecord]
    earlier: list[HistoryRecord]


class TrafficRecorder:
    """Recorder of the traffic around single requests."""

    def __init__(self, core: Scheduler, history: RequestHistory, surroundings: RecordedSurroundings) -> None:
        self._core, self._history, self._surroundings = core, history, surroundings

    def recording(
        self, request_id: str, step_times: StepTimes, now: float
    ) -> Generator[None, None, Recording | None]:
        """Create the recording around a recently ended request; None if the request is unknown.

        Yields after each part of the work, so that the scheduler can run in between.

        Args:
            request_id: the request's id, or its client's.
            now: time on the scheduler's clock.
        """
        subject = self._history.find(request_id)
        if subject is None or subject.conclude is None or subject.resumed:
            return None
        # Copies, because requests may end between two parts.
        known = [each for each in self._history.ended() if not each.resumed]
        yield
        known += (each for each in self._history.open() if not each.resumed)
        known.sort(key=lambda each: each.arrived_at)
        yield
        minutes = _minutes(known, subject, now)
        standing, changes = self._surroundings.at(minutes.at)
        requests: list[RecordedRequest] = []
        for one in minutes.requests:
            requests.append(self._recorded(one, minutes.at))
            if not len(requests) % _DESCRIBED:
                yield
        return Recording(
            request_id=subject.request_id,
            settings=_nameless_settings(standing.settings),
            partition=standing.partition,
            fleet=tuple(standing.fleet.values()),
            learned=_nameless_state(self._surroundings.learned_at(minutes.at)),
            changes=tuple(_since(minutes.at, change) for change in changes),
            step_times=step_times.by_pool,
            step_times_from=step_times.source,
            long_prompt_tokens=self._core.isolation.boundary_tokens,
            earlier_prompt_tokens=tuple(
                each.last.prompt_tokens for each in minutes.earlier if each.last is not None
            ),
            begins_idle=minutes.begins_idle,
            requests=tuple(requests),
        )

    def _recorded(self, known: HistoryRecord, at: float) -> RecordedRequest:
        last, request, times = known.last, known.gateway_request, known.gateway_request.times
        dispatched_s = last.at - at if last is not None else None
        first_token_s = None
        if dispatched_s is not None and times is not None and times.first_token_s is not None:
            first_token_s = dispatched_s + times.first_token_s
        prompt_tokens, output_tokens = self._expected(known)
        patience_s = known.expires_at - known.arrived_at
        return RecordedRequest(
            submission=_pseudonymized(request.submission),
            client_id=known.client_request_id,
            arrived_s=known.arrived_at - at,
            expires_after_s=patience_s if patience_s < float("inf") else None,
            outcome=known.conclude.conclusion.outcome if known.conclude is not None else None,
            usage=request.usage,
            wait_s=known.wait_s,
            dispatched_s=dispatched_s,
            first_token_s=first_token_s,
            ended_s=known.ended_at - at if known.conclude is not None else None,
            pool=last.dispatch.pool if last is not None else "",
            replica=last.dispatch.replica_id if last is not None else "",
            expected_prompt_tokens=prompt_tokens,
            expected_output_tokens=output_tokens,
        )

    def _expected(self, known: HistoryRecord) -> tuple[int, int]:
        """Return the expected prompt and output tokens, as estimated at dispatch or, without one, now."""
        if (last := known.last) is not None:
            return last.prompt_tokens, round(last.output_tokens)
        request = Request(
            submission=known.gateway_request.submission, gateway_id="", arrived_at=known.arrived_at
        )
        estimate = self._core.estimator.estimate(request)
        return estimate.expected_prompt_tokens, estimate.expected_output_tokens


def _minutes(known: list[HistoryRecord], subject: HistoryRecord, now: float) -> _Minutes:
    """Select the requests of a recording from all known ones, which are sorted by arrival."""
    place = known.index(subject)
    first, until = place, 0.0
    for index, each in enumerate(known[: place + 1]):
        if index == 0 or each.arrived_at > until:
            first = index
        until = max(until, min(each.ended_at, now))
    lead_from = known[place].arrived_at - LEAD_S
    earliest = max(first, place - MAX_BEFORE)
    while earliest < place and known[earliest].arrived_at < lead_from:
        earliest += 1
    at = known[earliest].arrived_at
    later = known[place + 1 : place + 1 + MAX_AFTER]
    end = subject.ended_at + max(_AFTERWARDS_S, subject.wait_s or 0.0)
    requests = [
        *(each for each in known[:earliest] if min(each.ended_at, now) > at),
        *known[earliest : place + 1],
    ]
    for each in later:
        if each.arrived_at > max(until, subject.ended_at) or each.arrived_at > end:
            break
        until = max(until, min(each.ended_at, now))
        requests.append(each)
    earlier = [each for each in known[:earliest] if min(each.ended_at, now) <= at]
    return _Minutes(at, earliest == first, requests, earlier[-_EARLIER:])


def _pseudonymized(submission: Submission) -> Submission:
    """Return a submission with a pseudonym, without prefix hashes, and with only the weight of its key."""
    weight = submission.key.weight if submission.key is not None else None
    key = None if weight is None else KeyTerms(key_id="", weight=weight)
    return replace(submission, tenant=pseudonym(submission.tenant), key=key, prefix=())


def _nameless_settings(settings: SchedulerSettings) -> SchedulerSettings:
    weights = {pseudonym(tenant): weight for tenant, weight in settings.fairness.weights.items()}
    return replace(settings, fairness=replace(settings.fairness, weights=weights))


def _nameless_state(learned: Mapping[str, Any]) -> dict[str, Any]:
    estimator = learned["estimator"]
    output = estimator["output"]
    tenants = [{**each, "tenant": pseudonym(each["tenant"])} for each in output["tenants"]]
    return {**learned, "estimator": {**estimator, "output": {**output, "tenants": tenants}}}


def _since(at: float, change: RecordedChange) -> RecordedChange:
    settings = None if change.settings is None else _nameless_settings(change.settings)
    return replace(change, at_s=change.at_s - at, settings=settings)
