"""What-if analysis of a request: replays each change of its recording, and reports it with its error.

The unchanged replay gives each recorded request a wait, to compare with the recorded one. A changed replay
gives the request in question another wait. The estimate of its real wait is

    replayed with the change + carried * (recorded - replayed without it)

where `carried` is the smaller of the two replayed waits over the larger. So a change without effect gives the
recorded wait, and a change to a very different queue gives the replayed one. Nothing is carried if the replay
does not reproduce the wait of the request, because its queue was already different.

The error bar is the error of the unchanged replay for nine of ten comparable requests: those that wait about
as long as the request would and, as far as its own error is carried, those that wait about as long as it did.
Both are treated as independent; shared errors would make the bar smaller.

That is too small if a change affects all requests, as another policy does. With another order, other requests
depend on small delays, which the unchanged replay does not show. The caller then passes how much the wait
depends on such delays (`sensitivity_s`), which widens the bar.

The step times are the recorded ones, either fitted by the tuner or those of a profile. If they are off by
more than a few percent for the recorded requests, the fit of `engine_fit` is tried as well. The replay with
the lower error in waits is used.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.tuning.counterfactuals.recording import RecordedRequest, Recording, RecordingError
from serve_app.tuning.counterfactuals.replay import (
    POLICY,
    ChangedRecording,
    ReplayedRequest,
    all_changes,
    pool_of,
    replay_recording,
)
from serve_app.tuning.engine_fit import EngineFitTask, Engines, engines_of_json, fit_engines
from serve_app.tuning.twin_calibration import CalibrationSettings, TwinCalibration

MIN_COMPARABLE = 12
"""Minimum number of comparable requests for an error bar, without which there is no estimate."""
_MAX_COMPARABLE = 40
_SHARE = 0.9
# Waits that differ by less are considered alike.
_ALIKE_S = 0.1


@dataclass(frozen=True, slots=True)
class Residual:
    """Replayed and recorded time of a request in the unchanged replay, in seconds."""

    request_id: str
    priority: PriorityClass
    replayed_s: float
    recorded_s: float

    @property
    def error_s(self) -> float:
        """Error in seconds; positive if the replay is too fast."""
        return self.recorded_s - self.replayed_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated time: about `seconds`, and between `low` and `high` in nine of ten cases."""

    seconds: float
    low: float
    high: float


class ErrorBars:
    """Errors of a replay.

    Args:
        residuals: of all requests except the one in question.
        own: residual of that one.
    """

    def __init__(self, residuals: Sequence[Residual], own: Residual) -> None:
        self._residuals, self._own = residuals, own

    @property
    def comparable(self) -> int:
        """Number of requests to compare the replay with."""
        return len(self._residuals)

    @property
    def bar_s(self) -> float:
        """Error of the unchanged replay for nine in ten requests like the one in question."""
        return self._off_by(self._own.replayed_s, self._own.priority)

    @property
    def reproduces(self) -> bool:
        """True if the unchanged replay reproduces the request's wait within its error bar."""
        return abs(self._own.error_s) <= self.bar_s

    @property
    def median_error_s(self) -> float:
        """Median absolute error of the replay."""
        errors = sorted(abs(each.error_s) for each in (*self._residuals, self._own))
        return errors[len(errors) // 2]

    def estimate(self, changed_s: float, priority: PriorityClass, sensitivity_s: float = 0.0) -> Estimate:
        """Return the estimated time of the request after a change.

        Args:
            changed_s: time in the changed replay.
            priority: class of the request after the change.
            sensitivity_s: effect of small delays on that time, if the change affects all requests.
        """
        own = self._own
        shorter, longer = sorted((changed_s, own.replayed_s))
        carried = (shorter / longer if longer else 1.0) if self.reproduces else 0.0
        seconds = max(0.0, changed_s + carried * own.error_s)
        bar = math.hypot(self._off_by(changed_s, priority), carried * self.bar_s, sensitivity_s)
        if not self.reproduces:
            bar = max(bar, abs(own.error_s))
        return Estimate(seconds, max(0.0, seconds - bar), seconds + bar)

    def _off_by(self, replayed_s: float, priority: PriorityClass) -> float:
        """Return the unchanged replay's error for nine of ten requests with about this replayed time.

        They are of the same class if there are enough.
        """
        alike = [each for each in self._residuals if each.priority is priority]
        if len(alike) < MIN_COMPARABLE:
            alike = list(self._residuals)

        def distance(each: Residual) -> float:
            return abs(math.log((each.replayed_s + _ALIKE_S) / (replayed_s + _ALIKE_S)))

        most = min(_MAX_COMPARABLE, max(MIN_COMPARABLE, len(alike) // 3))
        near = sorted(alike, key=distance)[:most]
        return _quantile([abs(each.error_s) for each in near])


def _quantile(values: Sequence[float]) -> float:
    """Return the smallest value that `_SHARE` of all do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[math.ceil(_SHARE * len(ordered)) - 1] if ordered else 0.0


# Error in mean TTFT from dispatch and in TPOT up to which recorded step times are used without a fit.
_MAX_ERROR_RATIO = 0.05
FITTED = "fitted to these requests"


@dataclass(frozen=True, slots=True)
class KnownEngines:
    """Step times by pool, and their origin in words."""

    by_pool: Engines
    source: str


def engines_of(recording: Recording) -> Iterator[KnownEngines]:
    """Yield candidates for the step times: the recorded ones, and those fitted to the recorded requests."""
    recorded = engines_of_json(recording.step_times)
    if recorded:
        yield KnownEngines(recorded, recording.step_times_from)
    fitted = _fitted(recording, recorded)
    if fitted:
        yield KnownEngines(fitted, FITTED)


def slowed(engines: Engines, factor: float) -> Engines:
    """Return the engines with step times multiplied by `factor`."""
    return {pool: replace(each, step_time=each.step_time.scaled(factor)) for pool, each in engines.items()}


def _fitted(recording: Recording, recorded: Engines) -> Engines:
    fleet = [*recording.fleet, *(each.joined for each in recording.changes if each.joined is not None)]
    if not fleet:
        return {}
    records = [record for each in recording.requests if (record := _record(each)) is not None]
    task = EngineFitTask(
        records=records,
        plans=TwinCalibration(CalibrationSettings(), None).plans(fleet),
        until=max((each.finished_at for each in records), default=0.0),
        current=recorded,
        max_error_ratio=_MAX_ERROR_RATIO,
    )
    return fit_engines(task).engines or {}


def _record(recorded: RecordedRequest) -> RequestRecord | None:
    """Return the request as its engine saw it; None if it was not dispatched or has not ended."""
    if recorded.dispatched_s is None or recorded.ended_s is None or recorded.outcome is None:
        return None
    usage = recorded.usage
    cached = usage.cached_tokens if usage is not None else 0
    return RequestRecord(
        request_id=recorded.request_id,
        arrived_at=recorded.arrived_s,
        dispatched_at=recorded.dispatched_s,
        first_token_at=recorded.first_token_s,
        finished_at=recorded.ended_s,
        outcome=recorded.outcome,
        prompt_tokens=max(1, recorded.prompt_tokens - cached),
        output_tokens=usage.output_tokens if usage is not None else 0,
        pool=recorded.pool,
        replica=recorded.replica,
    )


_REJECTED_IN_REPLAY = "rejected in the replay"
# Another order affects all requests. How much a wait depends on small delays is measured with engines that
# are slightly faster and slower, by the error at which step times count as right.
_OTHER_ENGINES = (0.97, 1.03)


class UnchangedReplay:
    """Unchanged replay of a recording, compared with what happened.

    Args:
        engines: step times of the replay.

    Attributes:
        played: result of each request.
    """

    def __init__(self, recording: Recording, engines: KnownEngines) -> None:
        self.engines = engines
        self.played: Mapping[str, ReplayedRequest] = replay_recording(recording, engines.by_pool)
        self._waits, self._ttfts = list[Residual](), list[Residual]()
        for each in recording.requests:
            played = self.played.get(each.request_id)
            if played is None or each.outcome is not Outcome.COMPLETED or played.outcome is not each.outcome:
                continue
            key = each.request_id, each.submission.priority
            if each.wait_s is not None:
                self._waits.append(Residual(*key, played.wait_s, each.wait_s))
            if each.ttft_s is not None and played.ttft_s is not None:
                self._ttfts.append(Residual(*key, played.ttft_s, each.ttft_s))

    def waits(self, subject: RecordedRequest) -> ErrorBars:
        """Return the errors of waits, for a request that has waited."""
        assert subject.wait_s is not None, "it has waited, to its end or to its dispatch"
        replayed_s = self.played[subject.request_id].wait_s
        own = Residual(subject.request_id, subject.submission.priority, replayed_s, subject.wait_s)
        return ErrorBars([each for each in self._waits if each.request_id != subject.request_id], own)

    def ttfts(self, subject: RecordedRequest) -> ErrorBars | None:
        """Return the errors of times to first token; None without one, or with too few others."""
        own = next((each for each in self._ttfts if each.request_id == subject.request_id), None)
        others = [each for each in self._ttfts if each is not own]
        return None if own is None or len(others) < MIN_COMPARABLE else ErrorBars(others, own)


class ChangedReplay:
    """Replay of a recording with one change.

    Args:
        baseline: unchanged replay of the same recording.
        on_replay: called after each replay.
    """

    def __init__(
        self,
        change: ChangedRecording,
        baseline: UnchangedReplay,
        on_replay: Callable[[], object] = lambda: None,
    ) -> None:
        self._baseline = baseline
        engines = [baseline.engines.by_pool]
        if change.kind == POLICY:
            engines += [slowed(engines[0], factor) for factor in _OTHER_ENGINES]
        found = []
        for each in engines:
            found.append(replay_recording(change.recording, each))
            on_replay()
        self.played: Mapping[str, ReplayedRequest] = found[0]
        self._others = found[1:]

    def wait(self, subject: RecordedRequest, priority: PriorityClass) -> Estimate:
        """Return the estimated wait of a request, which has the class `priority` after the change."""
        own_s = self.played[subject.request_id].wait_s
        others = [played[subject.request_id].wait_s for played in self._others]
        return self._baseline.waits(subject).estimate(own_s, priority, _furthest(own_s, others))

    def ttft(self, subject: RecordedRequest, priority: PriorityClass) -> Estimate | None:
        """Return its estimated time to first token; None if there is no estimate."""
        own_s, bars = self.played[subject.request_id].ttft_s, self._baseline.ttfts(subject)
        if own_s is None or bars is None:
            return None
        others = [played[subject.request_id].ttft_s for played in self._others]
        return bars.estimate(own_s, priority, _furthest(own_s, [each for each in others if each is not None]))


def _furthest(own_s: float, others: Sequence[float]) -> float:
    return max((abs(each - own_s) for each in others), default=0.0)


def what_if(recording: Recording, on_replay: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Return the what-if document, with times in milliseconds.

    Args:
        on_replay: called after each replay.

    Raises:
        RecordingError: there is no estimate for this request; the message has the reason.
    """
    _check(recording)
    baseline = unchanged(recording)
    on_replay()
    changes = [
        _change_document(change, recording.subject, ChangedReplay(change, baseline, on_replay))
        for change in all_changes(recording)
    ]
    return {
        "request_id": recording.request_id,
        "client_request_id": recording.subject.client_id,
        "class": recording.subject.submission.priority.value,
        "pool": pool_of(recording),
        "policy": recording.settings.policy,
        "recorded": {"wait_ms": _ms(recording.subject.wait_s), "ttft_ms": _ms(recording.subject.ttft_s)},
        "replay": _replay_document(recording, baseline),
        "changes": changes,
        "best": _best(changes),
    }


def replays_of(recording: Recording) -> int:
    """Return the number of replays of `what_if`, for a progress bar."""
    more = len(_OTHER_ENGINES)
    return 1 + sum(1 + more * (change.kind == POLICY) for change in all_changes(recording))


def _check(recording: Recording) -> None:
    subject = recording.subject
    if subject.outcome is not None and subject.outcome.is_rejection:
        raise RecordingError(
            f"{subject.client_id} was rejected ({subject.outcome.value}) and was never queued: `explain` "
            "without --what-if shows why"
        )
    if subject.wait_s is None or subject.outcome is None:
        raise RecordingError(f"{subject.client_id} has not ended: try again after its end")
    if not recording.fleet:
        raise RecordingError(
            "no replica was connected at the start of the recording, so there is nothing to replay"
        )


def unchanged(recording: Recording) -> UnchangedReplay:
    """Return the unchanged replay with the step times that suit the recording best.

    Raises:
        RecordingError: the engines' speed is unknown, or there are too few requests.
    """
    subject = recording.subject
    found = [UnchangedReplay(recording, engines) for engines in engines_of(recording)]
    if not found:
        raise RecordingError(
            "the engines' speed is unknown: set the tuner's `profile`, wait until it has seen 200 streamed "
            "responses, or have at least 20 streamed responses in the recorded minutes"
        )
    best = min(found, key=lambda each: each.waits(subject).median_error_s)
    if (comparable := best.waits(subject).comparable) < MIN_COMPARABLE:
        raise RecordingError(
            f"only {comparable} other requests were recorded in these minutes, but an estimate of the "
            f"replay's error needs at least {MIN_COMPARABLE}"
        )
    return best


def _change_document(
    change: ChangedRecording, subject: RecordedRequest, replay: ChangedReplay
) -> dict[str, Any]:
    played = replay.played[subject.request_id]
    priority = change.recording.subject.submission.priority
    document: dict[str, Any] = {
        "kind": change.kind,
        "value": change.value,
        "label": change.label,
        "omitted": list(change.omitted),
        "example": change.example,
        "note": "",
        "wait": None,
        "ttft": None,
    }
    if played.outcome.is_rejection:
        return {**document, "note": f"{_REJECTED_IN_REPLAY} ({played.outcome.value})"}
    if played.outcome is Outcome.EXPIRED:
        document["note"] = "expired in the queue of the replay"
    assert subject.wait_s is not None, "see _check"
    document["wait"] = _interval(replay.wait(subject, priority), played.wait_s, subject.wait_s)
    ttft = replay.ttft(subject, priority)
    if ttft is not None and played.ttft_s is not None and subject.ttft_s is not None:
        document["ttft"] = _interval(ttft, played.ttft_s, subject.ttft_s)
    return document


def _interval(estimate: Estimate, changed_s: float, recorded_s: float) -> dict[str, float | None]:
    return {
        "ms": _ms(estimate.seconds),
        "low_ms": _ms(estimate.low),
        "high_ms": _ms(estimate.high),
        "difference_ms": _ms(estimate.seconds - recorded_s),
        "replayed_ms": _ms(changed_s),
    }


def _replay_document(recording: Recording, baseline: UnchangedReplay) -> dict[str, Any]:
    """Return the quality of the unchanged replay, and its initial state."""
    own, waits = baseline.played[recording.request_id], baseline.waits(recording.subject)
    first, last = recording.requests[0], recording.requests[-1]
    return {
        "wait_ms": _ms(own.wait_s),
        "bar_ms": _ms(waits.bar_s),
        "reproduces": waits.reproduces,
        "median_error_ms": _ms(waits.median_error_s),
        "requests": len(recording.requests),
        "seconds": round(last.arrived_s - first.arrived_s, 3),
        "begins_idle": recording.begins_idle,
        "engines": baseline.engines.source,
    }


def _best(changes: list[dict[str, Any]]) -> str:
    """Return the change with the lowest wait whose bar is below the recorded wait; empty if there is none."""
    estimated = [each for each in changes if each["wait"] is not None]
    helpful = [
        each
        for each in estimated
        if each["wait"]["high_ms"] < each["wait"]["ms"] - each["wait"]["difference_ms"]
    ]
    return min(helpful, key=lambda each: each["wait"]["ms"])["label"] if helpful else ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
