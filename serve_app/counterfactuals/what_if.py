"""What would have helped a request: each change of its recording replayed, told with the replay's error."""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.counterfactuals.changes import POLICY, ChangedRecording, all_changes, pool_of
from serve_app.counterfactuals.engines import KnownEngines, engines_of
from serve_app.counterfactuals.error_bar import LEAST_COMPARABLE, ErrorBars, Residual, Told
from serve_app.counterfactuals.recording import RecordedRequest, Recording, RecordingError
from serve_app.counterfactuals.replay import Played, replay_recording
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

_REFUSED_IN_THE_REPLAY = "the replay refuses it"
# Another order moves all requests, and the bar is made of a replay in which none has moved.
_OF_ANOTHER_POLICY = "intervals of another policy held in three of four cases, not in nine of ten"


class UnchangedReplay:
    """The replay of a recording as it is, beside what happened.

    Args:
        engines: the step times that it is played with.

    Attributes:
        played: what became of each request in it.
    """

    def __init__(self, recording: Recording, engines: KnownEngines) -> None:
        self.engines = engines
        self.played: Mapping[str, Played] = replay_recording(recording, engines.step_times)
        self._waits, self._ttfts = list[Residual](), list[Residual]()
        for each in recording.requests:
            played = self.played.get(each.request_id)
            if played is None or each.outcome is not Outcome.COMPLETED or played.outcome is not each.outcome:
                continue
            told = each.request_id, each.submission.priority
            if each.wait_s is not None:
                self._waits.append(Residual(*told, played.wait_s, each.wait_s))
            if each.ttft_s is not None and played.ttft_s is not None:
                self._ttfts.append(Residual(*told, played.ttft_s, each.ttft_s))

    def waits(self, asked: RecordedRequest) -> ErrorBars:
        """What it gets wrong of waits, for a request that has waited."""
        assert asked.wait_s is not None, "it has waited, to its end or to its dispatch"
        replayed_s = self.played[asked.request_id].wait_s
        own = Residual(asked.request_id, asked.submission.priority, replayed_s, asked.wait_s)
        return ErrorBars([each for each in self._waits if each.request_id != asked.request_id], own)

    def ttfts(self, asked: RecordedRequest) -> ErrorBars | None:
        """The same of times to first token; None where it has none, or too few others have."""
        own = next((each for each in self._ttfts if each.request_id == asked.request_id), None)
        others = [each for each in self._ttfts if each is not own]
        return None if own is None or len(others) < LEAST_COMPARABLE else ErrorBars(others, own)


def what_if(recording: Recording, on_replay: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """The document of what would have been; times are milliseconds.

    Args:
        on_replay: called after each replay.

    Raises:
        RecordingError: nothing can be said about this request; the message says why.
    """
    _check(recording)
    baseline = unchanged(recording)
    on_replay()
    changes = []
    for change in all_changes(recording):
        changes.append(_told(change, recording, baseline))
        on_replay()
    return {
        "request_id": recording.request_id,
        "client_request_id": recording.asked.client_id,
        "class": recording.asked.submission.priority.value,
        "pool": pool_of(recording),
        "policy": recording.settings.policy,
        "recorded": {"wait_ms": _ms(recording.asked.wait_s), "ttft_ms": _ms(recording.asked.ttft_s)},
        "replay": _replay_document(recording, baseline),
        "changes": changes,
        "best": _best(changes),
    }


def replays_of(recording: Recording) -> int:
    """How many replays `what_if` counts, for a progress bar."""
    return 1 + sum(1 for _ in all_changes(recording))


def _check(recording: Recording) -> None:
    asked = recording.asked
    if asked.outcome is not None and asked.outcome.is_rejection:
        raise RecordingError(
            f"{asked.client_id} was refused ({asked.outcome.value}) and has not waited: `explain` without "
            "--what-if says why"
        )
    if asked.wait_s is None or asked.outcome is None:
        raise RecordingError(f"{asked.client_id} is still under way: ask again when it has ended")
    if not recording.fleet:
        raise RecordingError(
            "no replica was connected when these minutes began, so there is nothing to replay"
        )


def unchanged(recording: Recording) -> UnchangedReplay:
    """The replay of a recording as it is, with the step times that suit it best.

    Raises:
        RecordingError: nothing is known of the engines, or too few requests are.
    """
    asked = recording.asked
    found = [UnchangedReplay(recording, engines) for engines in engines_of(recording)]
    if not found:
        raise RecordingError(
            "nothing is known of how fast the engines are: give the tuner a `profile`, or let it see 200 "
            "streamed answers; at least 20 streamed answers in these minutes would do, too"
        )
    best = min(found, key=lambda each: each.waits(asked).median_error_s)
    if (comparable := best.waits(asked).comparable) < LEAST_COMPARABLE:
        raise RecordingError(
            f"only {comparable} other requests are known of these minutes, and the replay's error "
            f"is told from {LEAST_COMPARABLE} or more: there is no figure without it"
        )
    return best


def _told(change: ChangedRecording, recording: Recording, baseline: UnchangedReplay) -> dict[str, Any]:
    played = replay_recording(change.recording, baseline.engines.step_times)[recording.request_id]
    priority = change.recording.asked.submission.priority
    document: dict[str, Any] = {
        "kind": change.kind,
        "value": change.value,
        "label": change.label,
        "left_out": list(change.left_out),
        "note": _OF_ANOTHER_POLICY if change.kind == POLICY else "",
        "wait": None,
        "ttft": None,
    }
    if played.outcome.is_rejection:
        return {**document, "note": f"{_REFUSED_IN_THE_REPLAY} ({played.outcome.value})"}
    if played.outcome is Outcome.EXPIRED:
        document["note"] = "the replay lets it expire in the queue"
    recorded_s = recording.asked.wait_s
    assert recorded_s is not None, "_check has seen to it"
    document["wait"] = _interval(baseline.waits(recording.asked), played.wait_s, priority, recorded_s)
    ttft_s = recording.asked.ttft_s
    ttfts = baseline.ttfts(recording.asked)
    if ttfts is not None and played.ttft_s is not None and ttft_s is not None:
        document["ttft"] = _interval(ttfts, played.ttft_s, priority, ttft_s)
    return document


def _interval(
    bars: ErrorBars, changed_s: float, priority: PriorityClass, recorded_s: float
) -> dict[str, float | None]:
    told: Told = bars.told(changed_s, priority)
    return {
        "ms": _ms(told.seconds),
        "low_ms": _ms(told.low),
        "high_ms": _ms(told.high),
        "difference_ms": _ms(told.seconds - recorded_s),
        "replayed_ms": _ms(changed_s),
    }


def _replay_document(recording: Recording, baseline: UnchangedReplay) -> dict[str, Any]:
    """How good the unchanged replay is, and what it began with."""
    own, waits = baseline.played[recording.request_id], baseline.waits(recording.asked)
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
    """The change after which it waits least, if that is less than its wait beyond the bar; else nothing."""
    told = [each for each in changes if each["wait"] is not None]
    helpful = [
        each for each in told if each["wait"]["high_ms"] < each["wait"]["ms"] - each["wait"]["difference_ms"]
    ]
    return min(helpful, key=lambda each: each["wait"]["ms"])["label"] if helpful else ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
