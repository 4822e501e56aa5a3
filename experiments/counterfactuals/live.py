"""One live run: an application of its own, the requests over HTTP, and what its receipts say."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.common.application import Application, started_application
from experiments.common.open_loop import all_completed, play_trace
from experiments.counterfactuals.settings import CounterfactualsExperiment
from serve_app.bench.bodies import BodySettings
from serve_app.counterfactuals.recording import Recording, decode_recording
from serve_app.workloads.trace import Trace

_MODEL = "demo"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served, and what is sent.

    Attributes:
        places: of the requests in the unchanged trace.
    """

    policy: str
    replicas: int
    trace: Trace
    places: Sequence[int]


@dataclass(slots=True)
class LiveRun:
    """What became of the requests, by their place in the unchanged trace, in seconds.

    Attributes:
        recordings: of the requests that were asked about.
    """

    waits: dict[int, float] = field(default_factory=dict)
    ttfts: dict[int, float] = field(default_factory=dict)
    recordings: dict[int, Recording] = field(default_factory=dict)
    questions: list[tuple[str, int]] = field(default_factory=list)


def setup_of(experiment: CounterfactualsExperiment) -> Setup:
    """The run without a change."""
    trace = experiment.trace()
    return Setup(experiment.policy, experiment.replicas, trace, range(len(trace.requests)))


def live_run(experiment: CounterfactualsExperiment, setup: Setup, *, ask: bool = False) -> LiveRun:
    """Serve, send everything, and read the receipts.

    Args:
        ask: choose the requests to ask about, and keep the minutes around each.
    """
    with started_application("counterfactuals", [_model(experiment, setup)]) as application:
        load = all_completed(play_trace(application.url, BodySettings(model=_MODEL), setup.trace))
        found = LiveRun()
        for record in load.records:
            number = int(record.request_id.rpartition("-")[2])
            receipt = json.loads(application.fetched(f"/debug/requests/{record.request_id}"))
            place = setup.places[number]
            found.waits[place] = receipt["queue"]["ms"] / 1e3
            stages = {each["stage"]: each["ms"] for each in receipt["stages"]}
            found.ttfts[place] = (stages["queue"] + stages["until_first_token"]) / 1e3
        if ask:
            _ask(experiment, setup, application, found)
    return found


def _ask(
    experiment: CounterfactualsExperiment, setup: Setup, application: Application, found: LiveRun
) -> None:
    """The rule, which was fixed beforehand: evenly over the ranks of the waits, one question each."""
    waited = sorted((wait, place) for place, wait in found.waits.items() if wait >= experiment.least_wait_s)
    count = len(experiment.questions)
    for number, question in enumerate(experiment.questions):
        place = waited[int((number + 0.5) / count * len(waited))][1]
        text = application.fetched(f"/debug/requests/bench-{place}/recording")
        found.recordings[place] = decode_recording(text)
        found.questions.append((question, place))
    assert list(setup.places) == list(range(len(setup.trace.requests))), "asked of the unchanged run"


def _model(experiment: CounterfactualsExperiment, setup: Setup) -> dict[str, Any]:
    emulated = {"profile": experiment.profile, "max_num_seqs": experiment.max_num_seqs}
    pool = {
        "name": "all",
        "engine": {"emulated": emulated},
        "replicas": setup.replicas,
        "resources": {"num_cpus": 0.1},
    }
    return {
        "name": _MODEL,
        "pools": [pool],
        "scheduler": {"policy": setup.policy},
        # Nothing else changes meanwhile.
        "tuner": {"mode": False},
    }
