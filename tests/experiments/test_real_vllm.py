"""Experiment `real_vllm`: its scenes, figures and tables, without vLLM."""

import itertools

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import as_json, read_settings
from experiments.real_vllm.client import Answer, Plan, figures_of
from experiments.real_vllm.run import RealVllmSettings, rotated
from experiments.real_vllm.scenes import LIMITS_S, SCENES, Drawing, SceneSettings
from experiments.real_vllm.servers import STARTED, metric_of, slower_profile
from experiments.real_vllm.tables import TABLES
from serve_app.engines.model.roofline import load_profile
from serve_app.errors import SettingsError
from tests.experiments.builders import row

SCENE = SceneSettings(warm_up_s=2.0, seconds=8.0)
CONFIG = Catalogue().config("real_vllm")
WITHOUT_FILE = [name for name in SCENES if name != "agents"]


@pytest.mark.parametrize("scene", WITHOUT_FILE)
def test_systems_get_the_same_lengths_and_arrivals_in_other_texts(scene: str) -> None:
    ours, other = (SCENES[scene](SCENE, 8.0, Drawing(3, salt)) for salt in ("ours", "other"))
    both = [[ask for asks in (plan.asks, *plan.dialogues) for ask in asks] for plan in (ours, other)]
    assert len(both[0]) == len(both[1]) > 5
    for one, two in zip(*both, strict=True):
        assert (one.kind, one.at_s, one.output_tokens, one.tenant) == (
            two.kind,
            two.at_s,
            two.output_tokens,
            two.tenant,
        )
        words = [ask.messages[-1]["content"].split() for ask in (one, two)]
        assert len(words[0]) == len(words[1])
        assert words[0] != words[1]
    assert {ask.kind for ask in both[0]} <= set(ours.kinds)


def test_a_turn_repeats_everything_said_before() -> None:
    for dialogue in SCENES["conversations"](SCENE, 1.0, Drawing(1, "")).dialogues:
        for before, after in itertools.pairwise(dialogue):
            assert after.messages[: len(before.messages)] == before.messages


def test_a_body_states_its_user_and_only_batch_requests_a_class() -> None:
    late, batch = (SCENES[name](SCENE, 1.0, Drawing(1, "")) for name in ("late_user", "batch"))
    assert b'"user": "B"' in late.asks[-1].body()
    assert late.asks[-1].headers()["x-tenant"] == "B"
    assert batch.dialogues[0][0].headers()["x-priority"] == "batch"
    assert "x-priority" not in batch.asks[0].headers()


def test_figures_count_what_was_due_in_the_window() -> None:
    plan = Plan(kinds=("short", "long"), window=(10.0, 20.0))
    answers = [
        Answer("short", 9.0, 9.1, 9.5, 100, 0, 11),
        Answer("short", 11.0, 11.5, 12.5, 100, 50, 11),
        Answer("short", 12.0, 14.0, 15.0, 100, 0, 11),
        Answer("long", 13.0, 16.0, 21.0, 4_000, 0, 101),
        Answer("short", 14.0, None, 14.1, error="connection refused"),
    ]
    figures = figures_of(plan, answers, LIMITS_S, "batch")
    # The second one is late.
    assert figures["goodput_per_s"] == pytest.approx(0.2)
    assert figures["completed_per_s"] == pytest.approx(0.2)
    assert figures["errors"] == 1
    assert figures["short_ttft_mean_s"] == pytest.approx(1.25)
    assert figures["long_ttft_p99_s"] == pytest.approx(3.0)
    assert figures["short_cached_ratio"] == pytest.approx(0.25)
    assert figures["token_ms"] == pytest.approx((100 + 100 + 50) / 3)
    # Four of five seconds of the answer are in the window.
    assert figures["long_tokens_per_s"] == pytest.approx(101 * 0.8 / 10)


def test_each_seed_begins_with_another_system() -> None:
    assert [rotated(("a", "b", "c"), turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("change", ["systems=[haproxy]", "play=[nothing]", "profiles=[tpu]"])
def test_unknown_names_are_rejected(change: str) -> None:
    with pytest.raises(SettingsError, match=r"see config\.yaml"):
        read_settings(CONFIG, RealVllmSettings, changes=[change])


def test_a_slow_profile_takes_twice_as_long() -> None:
    name = "llama31-8b-rtx4090-tp1"
    with slower_profile(name, 2.0) as path:
        slow, normal = load_profile(path), load_profile(name)
    assert slow.step_time.decode_base_s == 2 * normal.step_time.decode_base_s
    assert slow.kv_tokens == normal.kv_tokens


def test_a_metric_is_summed_over_its_labels() -> None:
    text = (
        "# HELP vllm:request_success_total Count\n"
        'vllm:request_success_total{finished_reason="stop"} 2.0\n'
        'vllm:request_success_total{finished_reason="length"} 1e+01\n'
        'vllm:request_success_created{finished_reason="stop"} 9.0\n'
    )
    assert metric_of(text, "request_success_total") == 12.0


def test_tables_show_every_scene_that_has_rows() -> None:
    settings = as_json(read_settings(CONFIG, RealVllmSettings, quick=True))
    rows = [
        row(
            {"scene": scene, "profile": "llama31-8b-h100-tp1", "load": 0.5, "system": system},
            {"version": ["1.2"], **_figures(scene)},
            settings=settings,
        )
        for scene in SCENES
        for system in STARTED
    ]
    assert "| ours 1.2 | 1.00 / 1.00 | 1.00 / 1.00 | 1.0 |" in TABLES["headline"].written(rows)
    written = TABLES["scenes"].written(rows)
    assert written.count("| smg least_load 1.2 |") == len(SCENES) - 1
    assert "| H100, 0.5 | ours 1.2 |" in TABLES["loads"].written(rows)
    # A short run may have no long request.
    assert "| - |" in TABLES["load"].written(
        [row(rows[0].key, {**rows[0].figures, "long_ttft_p99_s": [None]})]
    )


def _figures(scene: str) -> dict[str, list[float]]:
    kinds = ("turn",) if scene == "agents" else SCENES[scene](SCENE, 1.0, Drawing(1, "")).kinds
    figures = figures_of(Plan(kinds=kinds, window=(0.0, 1.0)), [], {}, "")
    return {name: [0.0, 1.0, 2.0] for name in (*figures, "gateway_cores", "server_cores")}
