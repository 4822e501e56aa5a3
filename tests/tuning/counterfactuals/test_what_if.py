"""What-if results for a recorded simulation, where the truth is known."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from serve_app.cli.explain import format_what_if
from serve_app.errors import Outcome
from serve_app.tuning.counterfactuals.recording import (
    Recording,
    RecordingError,
    encode_recording,
    example_of_tenant,
    with_tenant_name,
)
from serve_app.tuning.counterfactuals.replay import all_changes, replay_recording
from serve_app.tuning.counterfactuals.what_if import (
    FITTED,
    best_unchanged_replay,
    candidate_step_times,
    replay_count,
    what_if,
)
from tests.tuning.counterfactuals.production import ENGINES, burst, produce

COUNT = 120


def recorded(seed: int = 0, count: int = COUNT, request_id: str = "") -> Recording:
    """Return the recording around the request that waited longest, or around another one."""
    production = produce(burst(count, seed))
    longest = max(production.records.values(), key=lambda each: each.queue_wait_s or 0.0)
    return production.recording(request_id or longest.request_id)


def disturbed(recording: Recording, seed: int = 5) -> Recording:
    """Return the recording with slightly longer or shorter waits of the other requests."""
    rng, requests = random.Random(seed), []
    for each in recording.requests:
        assert each.wait_s is not None
        factor = 1.0 if each.request_id == recording.request_id else rng.uniform(0.95, 1.05)
        requests.append(replace(each, wait_s=each.wait_s * factor))
    return replace(recording, requests=tuple(requests))


def test_every_change_is_reported_with_its_true_effect() -> None:
    recording = recorded()
    waits_ms, steps = [], []
    result = what_if(recording, lambda: steps.append(1))

    # A policy change is also replayed on slightly faster and slower engines.
    policies = sum(row["kind"] == "policy" for row in result["changes"])
    assert len(steps) == replay_count(recording) == 1 + len(result["changes"]) + 2 * policies
    assert result["replay"]["reproduces"]
    assert result["replay"]["bar_ms"] == pytest.approx(0.0, abs=1e-3)
    for change, row in zip(all_changes(recording), result["changes"], strict=True):
        really = replay_recording(change.recording, ENGINES)[recording.request_id]
        waits_ms.append(row["wait"]["ms"])
        assert row["wait"]["ms"] == pytest.approx(1e3 * really.wait_s, abs=0.01), row["label"]
        assert row["ttft"]["ms"] == pytest.approx(1e3 * (really.ttft_s or 0.0), abs=0.01), row["label"]
        assert row["note"] == ""
    best = next(each for each in result["changes"] if each["label"] == result["best"])
    assert best["wait"]["ms"] == min(waits_ms)


def test_another_policy_is_reported_with_the_effect_of_small_delays() -> None:
    # The unchanged replay is exact to the microsecond, so nothing else adds to the bar.
    rows = {row["label"]: row["wait"] for row in what_if(recorded())["changes"]}

    recording = recorded()
    slower = {pool: replace(each, step_time=each.step_time.scaled(1.03)) for pool, each in ENGINES.items()}
    change = next(each for each in all_changes(recording) if each.label == "policy sjf")
    moved_ms = 1e3 * replay_recording(change.recording, slower)[recording.request_id].wait_s
    wait = rows["policy sjf"]
    assert abs(moved_ms - wait["ms"]) > 1.0
    assert wait["low_ms"] - 0.01 <= moved_ms <= wait["high_ms"] + 0.01
    assert rows["as interactive"]["high_ms"] == pytest.approx(rows["as interactive"]["ms"], abs=0.01)


def test_the_tenant_that_is_left_out_gets_its_name_in_every_text() -> None:
    document = what_if(disturbed(recorded()))
    (change,) = [each for each in document["changes"] if each["kind"] == "tenant"]
    assert example_of_tenant(document) == change["example"]

    result = with_tenant_name({**document, "best": change["label"]}, "acme & sons")
    assert result["best"].endswith(" of tenant acme & sons")
    assert change["value"] not in json.dumps(result["changes"])
    others = [each for each in document["changes"] if each["kind"] != "tenant"]
    assert [each for each in result["changes"] if each["kind"] != "tenant"] == others


def test_the_same_recording_gives_the_same_result() -> None:
    recording = disturbed(recorded(1))
    assert what_if(recording) == what_if(recording)


def test_a_person_reads_a_table_and_what_would_have_helped_most() -> None:
    result = what_if(disturbed(recorded()))
    lines = list(format_what_if(result))

    text = "\n".join(lines)
    assert "as interactive" in text
    assert "one more replica in pool only" in text
    assert lines[-1].strip().startswith(f"largest reduction: {result['best']}")
    assert "does not reproduce" not in text


def test_a_wait_that_the_replay_does_not_have_is_reported() -> None:
    recording = recorded()
    subject = recording.subject
    assert subject.wait_s is not None
    wrong = replace(subject, wait_s=subject.wait_s + 20.0)
    requests = tuple(wrong if each is subject else each for each in recording.requests)

    result = what_if(replace(recording, requests=requests))

    assert not result["replay"]["reproduces"]
    assert "does not reproduce this wait" in "\n".join(format_what_if(result))
    for row in result["changes"]:
        assert row["wait"]["high_ms"] - row["wait"]["ms"] >= 19_000.0


def test_unknown_step_times_are_fitted() -> None:
    recording = replace(recorded(), step_times={}, step_times_from="")
    assert [each.source for each in candidate_step_times(recording)] == [FITTED]

    replay = best_unchanged_replay(recording)
    bars = replay.waits(recording.subject)
    assert bars.median_error_s < 0.5
    result = what_if(recording)
    assert result["replay"]["engines"] == FITTED
    assert next(each for each in result["changes"] if each["value"] == "interactive")["wait"]["ms"] < 2_000


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda each: replace(each, outcome=Outcome.REJECTED_QUEUE_FULL), "was rejected"),
        (lambda each: replace(each, outcome=None, wait_s=None), "has not ended"),
    ],
)
def test_a_request_that_did_not_wait_is_not_explained(broken: object, words: str) -> None:
    recording = recorded()
    assert callable(broken)
    requests = tuple(
        broken(each) if each.request_id == recording.request_id else each for each in recording.requests
    )
    with pytest.raises(RecordingError, match=words):
        what_if(replace(recording, requests=requests))


def test_without_engines_or_others_there_is_no_figure() -> None:
    recording = recorded()
    few = replace(recording, requests=(recording.subject,), step_times={}, step_times_from="")
    with pytest.raises(RecordingError, match="speed is unknown"):
        what_if(few)
    with pytest.raises(RecordingError, match="only 0 other requests"):
        what_if(replace(recording, requests=(recording.subject,)))
    with pytest.raises(RecordingError, match="no replica was connected"):
        what_if(replace(recording, fleet=()))


def test_the_process_beside_a_gateway_answers_with_the_same_or_with_an_error() -> None:
    def run(text: str) -> dict[str, object]:
        command = [sys.executable, "-m", "serve_app.tuning.counterfactuals"]
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=120)
        found: dict[str, object] = json.loads(done.stdout)
        return found

    recording = recorded(count=40)
    assert run(encode_recording(recording)) == what_if(recording)
    assert "not a recording" in str(run("{")["error"])
