"""Replays: equal to the recorded simulation, and with a change equal to the changed simulation."""

import msgspec
import pytest

from serve_app.request import PriorityClass
from serve_app.serving.scheduler import recordings as minutes
from serve_app.tuning.counterfactuals.recording import RecordingError, decode_recording
from serve_app.tuning.counterfactuals.replay import ChangedRecording, all_changes, replay_recording
from tests.tuning.counterfactuals.production import (
    ENGINES,
    FLEET,
    Production,
    burst,
    produce,
    with_priority,
)

COUNT = 120


def slowest(production: Production, priority: PriorityClass) -> str:
    of_class = [each for each in production.records.values() if each.priority is priority]
    return max(of_class, key=lambda each: each.queue_wait_s or 0.0).request_id


@pytest.mark.parametrize("policy", ["ewsjf", "fcfs"])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_without_a_change_has_every_wait(policy: str, seed: int) -> None:
    production = produce(burst(COUNT, seed, streamed=False), policy=policy)
    subject = slowest(production, PriorityClass.BATCH)
    assert production.wait_s(subject) > 1.0

    recording = production.recording(subject)
    assert recording.begins_idle
    assert recording.requests[0].request_id == "r0"
    played = replay_recording(recording, ENGINES)

    for each in recording.requests:
        assert played[each.request_id].wait_s == production.wait_s(each.request_id)
        assert played[each.request_id].wait_s == pytest.approx(each.wait_s, abs=1e-9)
        if each.ttft_s is not None:
            assert played[each.request_id].ttft_s == pytest.approx(each.ttft_s, abs=1e-9)


def really(change: ChangedRecording, seed: int, subject: str) -> Production:
    """Return the production with the change applied."""
    requests = burst(COUNT, seed)
    match change.kind:
        case "class":
            return produce(with_priority(requests, subject, PriorityClass(change.value)))
        case "replica":
            return produce(requests, fleet=(*FLEET, f"{change.value}+1"))
        case "policy":
            return produce(requests, policy=change.value)
        case _:
            gone = {client_id.removeprefix("client-") for client_id in change.omitted}
            return produce([each for each in requests if each.request.request_id not in gone])


@pytest.mark.parametrize("seed", range(2))
def test_a_changed_replay_is_the_changed_simulation(seed: int) -> None:
    production = produce(burst(COUNT, seed))
    subject = slowest(production, PriorityClass.BATCH)
    recording = production.recording(subject)
    changes = list(all_changes(recording))
    assert {each.kind for each in changes} == {
        *("class", "replica", "policy", "long_prefills", "tenant", "own_requests")
    }

    waits = set()
    for change in changes:
        played = replay_recording(change.recording, ENGINES)
        wait_s = played[subject].wait_s
        waits.add(wait_s)
        assert wait_s == really(change, seed, subject).wait_s(subject), change.label
    assert len(waits) > len(changes) / 2


def test_minutes_that_begin_within_the_busy_period_include_running_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(minutes, "LEAD_S", 8.0)
    production = produce(burst(COUNT, 1))
    subject = max(production.records.values(), key=lambda each: each.arrived_at).request_id

    recording = production.recording(subject)

    assert not recording.begins_idle
    under_way = [each for each in recording.requests if each.arrived_s < 0]
    assert under_way
    assert all(each.ended_s is None or each.ended_s > 0 for each in under_way)
    played = replay_recording(recording, ENGINES)
    assert set(played) == {each.request_id for each in recording.requests}


def test_a_recording_names_no_tenant_and_holds_no_hash() -> None:
    production = produce(burst(COUNT, 0))
    recording = production.recording("r50")

    text = str(msgspec.to_builtins(recording))
    assert "tenant-" not in text
    tenants = {each.submission.tenant for each in recording.requests}
    assert len(tenants) == 3
    assert all(each.submission.prefix == () for each in recording.requests)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99}', '{"version": 1}'])
def test_an_invalid_recording_is_rejected(text: str) -> None:
    with pytest.raises(RecordingError):
        decode_recording(text)
