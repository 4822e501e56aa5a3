"""What would have helped a request: each change of its recording replayed, told with the replay's error."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.counterfactuals.changes import POLICY, ChangedRecording, all_changes, pool_of
from serve_app.counterfactuals.engines import KnownEngines, engines_of, slowed
from serve_app.counterfactuals.error_bar import LEAST_COMPARABLE, ErrorBars, Residual, Told
from serve_app.counterfactuals.recording import RecordedRequest, Recording, RecordingError
from serve_app.counterfactuals.replay import Played, replay_recording
from serve_app.errors import Outcome
from serve_app.request import PriorityClass

_REFUSED_IN_THE_REPLAY = "the replay refuses it"
# Another order moves all requests. How much a wait depends on small delays in it is seen on engines a little
# faster and slower: as much as step times are off when they count as right.
_OTHER_ENGINES = (0.97, 1.03)


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


class ChangedReplay:
    """The replay of a recording with one thing changed.

    Args:
        baseline: of the same recording as it is.
        on_replay: called after each replay.
    """

    def __init__(
        self,
        change: ChangedRecording,
        baseline: UnchangedReplay,
        on_replay: Callable[[], object] = lambda: None,
    ) -> None:
        self._baseline = baseline
        engines = [baseline.engines.step_times]
        if change.kind == POLICY:
            engines += [slowed(engines[0], factor) for factor in _OTHER_ENGINES]
        found = []
        for step_times in engines:
            found.append(replay_recording(change.recording, step_times))
            on_replay()
        self.played: Mapping[str, Played] = found[0]
        self._others = found[1:]

    def wait(self, asked: RecordedRequest, priority: PriorityClass) -> Told:
        """The wait of a request of the recording.

        Args:
            priority: the class that it has after the change.
        """
        own_s = self.played[asked.request_id].wait_s
        others = [played[asked.request_id].wait_s for played in self._others]
        return self._baseline.waits(asked).told(own_s, priority, _furthest(own_s, others))

    def ttft(self, asked: RecordedRequest, priority: PriorityClass) -> Told | None:
        """The same of its time to first token; None where nothing can be said."""
        own_s, bars = self.played[asked.request_id].ttft_s, self._baseline.ttfts(asked)
        if own_s is None or bars is None:
            return None
        others = [played[asked.request_id].ttft_s for played in self._others]
        return bars.told(own_s, priority, _furthest(own_s, [each for each in others if each is not None]))


def _furthest(own_s: float, others: Sequence[float]) -> float:
    return max((abs(each - own_s) for each in others), default=0.0)


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
    changes = [
        _told(change, recording.asked, ChangedReplay(change, baseline, on_replay))
        for change in all_changes(recording)
    ]
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
    more = len(_OTHER_ENGINES)
    return 1 + sum(1 + more * (change.kind == POLICY) for change in all_changes(recording))


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


def _told(change: ChangedRecording, asked: RecordedRequest, replay: ChangedReplay) -> dict[str, Any]:
    played = replay.played[asked.request_id]
    priority = change.recording.asked.submission.priority
    document: dict[str, Any] = {
        "kind": change.kind,
        "value": change.value,
        "label": change.label,
        "left_out": list(change.left_out),
        "example": change.example,
        "note": "",
        "wait": None,
        "ttft": None,
    }
    if played.outcome.is_rejection:
        return {**document, "note": f"{_REFUSED_IN_THE_REPLAY} ({played.outcome.value})"}
    if played.outcome is Outcome.EXPIRED:
        document["note"] = "the replay lets it expire in the queue"
    assert asked.wait_s is not None, "_check has seen to it"
    document["wait"] = _interval(replay.wait(asked, priority), played.wait_s, asked.wait_s)
    ttft = replay.ttft(asked, priority)
    if ttft is not None and played.ttft_s is not None and asked.ttft_s is not None:
        document["ttft"] = _interval(ttft, played.ttft_s, asked.ttft_s)
    return document


def _interval(told: Told, changed_s: float, recorded_s: float) -> dict[str, float | None]:
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
