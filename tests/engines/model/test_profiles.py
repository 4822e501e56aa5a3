from pathlib import Path

import pytest

from serve_app.engines.model import SchedulingPolicy
from serve_app.engines.model.roofline import load_profile, profile_names, save_profile
from serve_app.errors import SettingsError

COEFFICIENTS = "decode_per_sequence_s: 0, prefill_base_s: 0, prefill_per_token_s: 1"
LIMITS = "kv_tokens: 100\nmax_model_len: 100"


def test_every_profile_of_the_package_can_be_loaded() -> None:
    assert {"laptop", "llama2-70b-h100-tp4", "llama31-8b-rtx4090-tp1"} <= set(profile_names())
    for name in profile_names():
        settings = load_profile(name).model_settings()
        assert settings.kv_blocks * settings.block_size >= settings.max_model_len


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_of_the_package_charges_for_context(name: str) -> None:
    step_time = load_profile(name).step_time
    assert step_time.decode_per_context_token_s > 0
    assert step_time.prefill_per_pair_s > 0


def test_the_70b_profile_has_the_published_figures() -> None:
    profile = load_profile("llama2-70b-h100-tp4")
    # Prompts of 512 tokens, half of 128 generated.
    assert profile.step_time.step_s(sequences=10, context_tokens=10 * 576) == pytest.approx(
        0.0288 + 10 * 0.00034, rel=1e-4
    )
    assert profile.step_time.step_s(prefill_tokens=1_000) == pytest.approx(0.104)
    assert (profile.kv_tokens, profile.max_num_seqs, profile.max_num_batched_tokens) == (427_000, 256, 2_048)
    assert profile.gpus == 4


def test_overrides_replace_figures_and_none_leaves_them() -> None:
    settings = load_profile("laptop").model_settings(
        kv_tokens=9_000, max_num_seqs=None, scheduling_policy=SchedulingPolicy.PRIORITY
    )
    assert (settings.kv_tokens, settings.max_num_seqs) == (9_000, 16)
    assert settings.scheduling_policy is SchedulingPolicy.PRIORITY


def test_a_saved_profile_is_read_back(tmp_path: Path) -> None:
    profile = load_profile("llama31-8b-rtx4090-tp1")
    path = tmp_path / "mine.yaml"
    save_profile(profile, path, source="measured here\ntwice")
    assert path.read_text().startswith("# measured here\n# twice\n")
    assert load_profile(str(path)) == profile


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("kv_tokens: [", "is not an engine profile"),
        ("kv_tokens: 1", "step_time"),
        (
            f"step_time: {{{COEFFICIENTS}, decode_base_s: 1, decode_per_token_s: 1}}\n{LIMITS}",
            "decode_per_token_s",
        ),
        (
            f"step_time: {{{COEFFICIENTS}, decode_base_s: -1}}\n{LIMITS}",
            "decode_base_s must not be negative, got -1.0",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_rejected_by_its_fault(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        load_profile(str(path))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"no engine profile 'gpt'.*laptop"):
        load_profile("gpt")
