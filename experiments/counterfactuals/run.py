"""What an application says would have helped a request: is it what really would have?

A fixed trace of requests overloads an application on emulated engines. Ten of those that waited are chosen by
a rule that was fixed before, and each is explained with one change. Then the same trace is served live with
that change: the request sent with another class, another policy, one replica more, or without the long
prefills beside it. The unchanged trace is served several times, to see how much the same wait varies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.counterfactuals.live import LiveRun, Setup, live_run, setup_of
from experiments.counterfactuals.settings import CounterfactualsExperiment
from serve_app.command import progress_bar
from serve_app.counterfactuals.changes import (
    ChangedRecording,
    all_changes,
    with_policy,
    with_replica,
)
from serve_app.counterfactuals.error_bar import Told
from serve_app.counterfactuals.recording import Recording
from serve_app.counterfactuals.what_if import ChangedReplay, UnchangedReplay, unchanged
from serve_app.request import PriorityClass

_CLASS_ASKED = {
    PriorityClass.BATCH: PriorityClass.INTERACTIVE,
    PriorityClass.DEFAULT: PriorityClass.INTERACTIVE,
    PriorityClass.INTERACTIVE: PriorityClass.DEFAULT,
}
_TRACE = "mixed overload"


@dataclass(frozen=True, slots=True)
class _Question:
    """One request, and one change."""

    place: int
    change: ChangedRecording
    recording: Recording


def play(experiment: CounterfactualsExperiment, context: Context) -> Iterator[Measurement]:
    """The unchanged runs, then one changed run for each change that is asked about."""
    del context
    setup = setup_of(experiment)
    with progress_bar("live runs", experiment.repeats + len(experiment.questions)) as advance:
        runs = []
        for number in range(experiment.repeats):
            runs.append(live_run(experiment, setup, ask=number == 0))
            advance()
        first = runs[0]
        replay = unchanged(next(iter(first.recordings.values())))
        yield Measurement(
            key={"row": "unchanged"},
            figures=_unchanged_figures(experiment, runs, replay),
            traces=generated(_TRACE),
        )
        changed: dict[str, LiveRun] = {}
        for number, (text, place) in enumerate(first.questions, start=1):
            question = _question(text, place, first.recordings[place])
            name = question.change.label if question.change.kind in ("policy", "replica") else str(number)
            if name not in changed:
                changed[name] = live_run(experiment, _changed(setup, question))
                advance()
            yield _answer(number, question, runs, changed[name])
        for name, run in changed.items():
            if not name.isdigit():
                asked = first.recordings[first.questions[0][1]]
                yield _all_of(name, _told_of_all(name, asked, run, replay), experiment.least_wait_s)


def _question(text: str, place: int, recording: Recording) -> _Question:
    kind, _, value = text.partition(" ")
    if kind == "class":
        value = _CLASS_ASKED[recording.asked.submission.priority].value
    for change in all_changes(recording):
        if change.kind == kind and (not value or change.value == value):
            return _Question(place, change, recording)
    raise ValueError(f"request {place} cannot be asked about {text!r}")


def _changed(setup: Setup, question: _Question) -> Setup:
    """The live run in which the change is really made."""
    change, requests = question.change, setup.trace.requests
    match change.kind:
        case "policy":
            return replace(setup, policy=change.value)
        case "replica":
            return replace(setup, replicas=setup.replicas + 1)
        case "class":
            other = replace(requests[question.place], priority=PriorityClass(change.value))
            kept = [other if place == question.place else one for place, one in enumerate(requests)]
            return replace(setup, trace=replace(setup.trace, requests=tuple(kept)))
        case _:
            gone = {int(client_id.rpartition("-")[2]) for client_id in change.left_out}
            places = [place for place in setup.places if place not in gone]
            trace = replace(setup.trace, requests=tuple(requests[place] for place in places))
            return replace(setup, trace=trace, places=places)


def _answer(number: int, question: _Question, runs: Sequence[LiveRun], live: LiveRun) -> Measurement:
    recording, change, place = question.recording, question.change, question.place
    replay = unchanged(recording)
    changed = ChangedReplay(change, replay)
    priority = change.recording.asked.submission.priority
    ttft = changed.ttft(recording.asked, priority)
    assert ttft is not None, "every answer is streamed"
    return Measurement(
        key={"row": "question", "number": number},
        figures={
            "request": place,
            "class": recording.asked.submission.priority.value,
            "change": change.label,
            "reproduced": replay.waits(recording.asked).reproduces,
            "engines": replay.engines.source,
            "wait": _held_against(changed.wait(recording.asked, priority), live.waits[place]),
            "ttft": _held_against(ttft, live.ttfts[place]),
            "unchanged_wait_s": [run.waits[place] for run in runs],
            "unchanged_ttft_s": [run.ttfts[place] for run in runs],
            "replayed_unchanged_s": replay.played[recording.request_id].wait_s,
        },
        traces=generated(_TRACE),
    )


def _held_against(told: Told, real_s: float) -> dict[str, Any]:
    return {
        "predicted_s": told.seconds,
        "low_s": told.low,
        "high_s": told.high,
        "real_s": real_s,
        "inside": told.low <= real_s <= told.high,
    }


def _told_of_all(
    name: str, recording: Recording, live: LiveRun, replay: UnchangedReplay
) -> list[dict[str, Any]]:
    """The same change told of every request, beside the one live run of it."""
    policy = name.removeprefix("policy ")
    change = with_replica(recording) if policy == name else with_policy(recording, policy)
    changed = ChangedReplay(change, replay)
    told = []
    for each in recording.requests:
        place = int(each.client_id.rpartition("-")[2])
        real = _held_against(changed.wait(each, each.submission.priority), live.waits[place])
        told.append({**real, "recorded_s": each.wait_s, "width_s": real["high_s"] - real["low_s"]})
    return told


def _all_of(name: str, all_told: Sequence[Mapping[str, Any]], least_wait_s: float) -> Measurement:
    """Of those that waited before the change, or after it, or were told to."""
    told = [
        each
        for each in all_told
        if max(each["recorded_s"], each["real_s"], each["predicted_s"]) >= least_wait_s
    ]
    return Measurement(
        key={"row": "all", "change": name},
        figures={
            "requests": len(told),
            "of": len(all_told),
            "inside_ratio": sum(each["inside"] for each in told) / len(told),
            "median_error_s": median(abs(each["predicted_s"] - each["real_s"]) for each in told),
            "median_width_s": median(each["width_s"] for each in told),
            "median_change_s": median(abs(each["recorded_s"] - each["real_s"]) for each in told),
            "sign_ratio": _sign_ratio(told),
        },
        traces=generated(_TRACE),
    )


def _sign_ratio(told: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the waits that really changed by a second or more: the share told to change that way."""
    clear = [each for each in told if abs(each["real_s"] - each["recorded_s"]) >= 1.0]
    right = [
        each
        for each in clear
        if (each["predicted_s"] < each["recorded_s"]) is (each["real_s"] < each["recorded_s"])
    ]
    return len(right) / len(clear) if clear else None


def _unchanged_figures(
    experiment: CounterfactualsExperiment, runs: Sequence[LiveRun], replay: UnchangedReplay
) -> dict[str, Any]:
    first = runs[0]
    waited = [place for place, wait in first.waits.items() if wait >= experiment.least_wait_s]
    again = [abs(run.waits[place] - first.waits[place]) for run in runs[1:] for place in waited]
    any_recording = next(iter(first.recordings.values()))
    replayed = [
        abs(replay.played[each.request_id].wait_s - each.wait_s)
        for each in any_recording.requests
        if each.wait_s is not None and each.wait_s >= experiment.least_wait_s
    ]
    return {
        "requests": len(first.waits),
        "waited": len(waited),
        "runs": len(runs),
        "wait_s": sorted(first.waits[place] for place in waited),
        "again_median_s": median(again) if again else None,
        "again_p90_s": sorted(again)[int(0.9 * len(again))] if again else None,
        "replay_median_s": median(replayed),
        "replay_p90_s": sorted(replayed)[int(0.9 * len(replayed))],
        "engines": replay.engines.source,
    }


EXPERIMENT = Experiment(settings=CounterfactualsExperiment, play=play)
