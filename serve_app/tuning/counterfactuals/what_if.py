"""What-if analysis of a request: replays each change of its recording, and reports it with its error.

The unchanged replay yields a wait for each recorded request, to compare with the recorded one. A changed
replay yields another wait for the request in question. The estimate of its real wait is

    replayed with the change + weight * (recorded - replayed without it)

The weight of this correction is the ratio of the smaller to the larger of the two replayed waits: 1 for a
change without effect, near 0 for a very different queue. It is 0 if the unchanged replay does not reproduce
the wait of the request, because its queue was already different.

The error bar is the error of the unchanged replay for 90 % of comparable requests: those that wait about as
long as the request would after the change and, multiplied by the weight, those that wait about as long as it
did. Both are treated as independent; shared errors would make the bar smaller.

This bar is too small if a change affects all requests, as another policy does. In another order, other
requests depend on small delays, which the unchanged replay does not show. The caller then passes how much the
wait depends on such delays (`sensitivity_s`), which widens the bar.

The step times are the recorded ones, either fitted by the tuner or those of a profile. If they are off by
more than 5 % for the recorded requests, the fit of `engine_fit` is tried as well. The replay with the lower
error in waits is used.
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
_COVERAGE = 0.9
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
    """Estimated time: about `seconds`, and between `low_s` and `high_s` in 90 % of cases."""

    seconds: float
    low_s: float
    high_s: float


class ErrorBars:
    """Errors of a replay.

    Args:
        residuals: of all requests except the one in question.
        own: residual of that one.
    """

    def __init__(self, residuals: Sequence[Residual], own: Residual) -> None:
        self._residuals, self._own = residuals, own

    @property
    def residual_count(self) -> int:
        """Number of requests to compare the replay with."""
        return len(self._residuals)

    @property
    def bar_s(self) -> float:
        """90 % quantile of the unchanged replay's error, for requests like the one in question."""
        return self._error_quantile_s(self._own.replayed_s, self._own.priority)

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
        weight = (shorter / longer if longer else 1.0) if self.reproduces else 0.0
        seconds = max(0.0, changed_s + weight * own.error_s)
        bar = math.hypot(self._error_quantile_s(changed_s, priority), weight * self.bar_s, sensitivity_s)
        if not self.reproduces:
            bar = max(bar, abs(own.error_s))
        return Estimate(seconds, max(0.0, seconds - bar), seconds + bar)

    def _error_quantile_s(self, replayed_s: float, priority: PriorityClass) -> float:
        """Return the 90 % quantile of the error in the unchanged replay, for requests with about this wait.

        Only requests of the same class count if there are enough.
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
    """Return the smallest value that `_COVERAGE` of all do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[math.ceil(_COVERAGE * len(ordered)) - 1] if ordered else 0.0


# Error in mean TTFT from dispatch and in TPOT up to which recorded step times are used without a fit.
_MAX_ERROR_RATIO = 0.05
FITTED = "fitted to these requests"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times by pool, and their origin in words."""

    by_pool: Engines
    source: str


def candidate_step_times(recording: Recording) -> Iterator[StepTimes]:
    """Yield candidates for the step times: the recorded ones, and those fitted to the recorded requests."""
    recorded = engines_of_json(recording.step_times)
    if recorded:
        yield StepTimes(recorded, recording.step_times_from)
    fitted = _fitted(recording, recorded)
    if fitted:
        yield StepTimes(fitted, FITTED)


def scale_step_times(engines: Engines, factor: float) -> Engines:
    """Return the engines with their step times multiplied by `factor`."""
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
# A change of the order affects all requests. Replays with slightly faster and slower engines measure how much
# a wait then depends on small delays.
_SPEED_FACTORS = (0.97, 1.03)


class UnchangedReplay:
    """Unchanged replay of a recording, compared with what happened.

    Args:
        engines: step times of the replay.

    Attributes:
        results: result of each request.
    """

    def __init__(self, recording: Recording, engines: StepTimes) -> None:
        self.engines = engines
        self.results: Mapping[str, ReplayedRequest] = replay_recording(recording, engines.by_pool)
        self._waits, self._ttfts = list[Residual](), list[Residual]()
        for each in recording.requests:
            result = self.results.get(each.request_id)
            if result is None or each.outcome is not Outcome.COMPLETED or result.outcome is not each.outcome:
                continue
            key = each.request_id, each.submission.priority
            if each.wait_s is not None:
                self._waits.append(Residual(*key, result.wait_s, each.wait_s))
            if each.ttft_s is not None and result.ttft_s is not None:
                self._ttfts.append(Residual(*key, result.ttft_s, each.ttft_s))

    def waits(self, subject: RecordedRequest) -> ErrorBars:
        """Return the errors of waits, for a request that has waited."""
        assert subject.wait_s is not None, "it has waited, to its end or to its dispatch"
        replayed_s = self.results[subject.request_id].wait_s
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
            engines += [scale_step_times(engines[0], factor) for factor in _SPEED_FACTORS]
        found = []
        for each in engines:
            found.append(replay_recording(change.recording, each))
            on_replay()
        self.results: Mapping[str, ReplayedRequest] = found[0]
        self._others = found[1:]

    def wait(self, subject: RecordedRequest, priority: PriorityClass) -> Estimate:
        """Return the estimated wait of a request, which has the class `priority` after the change."""
        own_s = self.results[subject.request_id].wait_s
        others = [results[subject.request_id].wait_s for results in self._others]
        return self._baseline.waits(subject).estimate(own_s, priority, _furthest(own_s, others))

    def ttft(self, subject: RecordedRequest, priority: PriorityClass) -> Estimate | None:
        """Return its estimated time to first token; None if there is no estimate."""
        own_s, bars = self.results[subject.request_id].ttft_s, self._baseline.ttfts(subject)
        if own_s is None or bars is None:
            return None
        others = [results[subject.request_id].ttft_s for results in self._others]
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
    baseline = best_unchanged_replay(recording)
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


def replay_count(recording: Recording) -> int:
    """Return the number of replays of `what_if`, for a progress bar."""
    more = len(_SPEED_FACTORS)
    return 1 + sum(1 + more * (change.kind == POLICY) for change in all_changes(recording))


def _check(recording: Recording) -> None:
    subject = recording.subject
    if subject.outcome is not None and subject.outcome.is_rejection:
        raise RecordingError(
            f"{subject.client_id} was rejected ({subject.outcome.value}), so there is no wait to analyse: "
            "run `explain` without --what-if to see why"
        )
    if subject.wait_s is None or subject.outcome is None:
        raise RecordingError(f"{subject.client_id} has not ended: try again after its end")
    if not recording.fleet:
        raise RecordingError(
            "no replica was connected at the start of the recording, so there is nothing to replay: choose a "
            "later request"
        )


def best_unchanged_replay(recording: Recording) -> UnchangedReplay:
    """Return the unchanged replay with the step times that suit the recording best.

    Raises:
        RecordingError: the engines' speed is unknown, or there are too few requests.
    """
    subject = recording.subject
    found = [UnchangedReplay(recording, engines) for engines in candidate_step_times(recording)]
    if not found:
        raise RecordingError(
            "the engines' speed is unknown: set the tuner's `profile`, wait until it has seen 200 streamed "
            "responses, or have at least 20 streamed responses in the recorded minutes"
        )
    best = min(found, key=lambda each: each.waits(subject).median_error_s)
    others = best.waits(subject).residual_count
    if others < MIN_COMPARABLE:
        raise RecordingError(
            f"only {others} other requests were recorded in these minutes; an error estimate needs at least "
            f"{MIN_COMPARABLE}: choose a request with more traffic around it"
        )
    return best


def _change_document(
    change: ChangedRecording, subject: RecordedRequest, replay: ChangedReplay
) -> dict[str, Any]:
    result = replay.results[subject.request_id]
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
    if result.outcome.is_rejection:
        return {**document, "note": f"{_REJECTED_IN_REPLAY} ({result.outcome.value})"}
    if result.outcome is Outcome.EXPIRED:
        document["note"] = "expired in the queue of the replay"
    assert subject.wait_s is not None, "see _check"
    document["wait"] = _interval(replay.wait(subject, priority), result.wait_s, subject.wait_s)
    ttft = replay.ttft(subject, priority)
    if ttft is not None and result.ttft_s is not None and subject.ttft_s is not None:
        document["ttft"] = _interval(ttft, result.ttft_s, subject.ttft_s)
    return document


def _interval(estimate: Estimate, changed_s: float, recorded_s: float) -> dict[str, float | None]:
    return {
        "ms": _ms(estimate.seconds),
        "low_ms": _ms(estimate.low_s),
        "high_ms": _ms(estimate.high_s),
        "difference_ms": _ms(estimate.seconds - recorded_s),
        "replayed_ms": _ms(changed_s),
    }


def _replay_document(recording: Recording, baseline: UnchangedReplay) -> dict[str, Any]:
    """Return the quality of the unchanged replay, and its initial state."""
    own, waits = baseline.results[recording.request_id], baseline.waits(recording.subject)
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
