"""Roofline model: against measurements, the memory of real GPUs, and the packaged profiles."""

import csv
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import roofline_profiles
from roofline_profiles import SETUPS, engine_setup, profile_name, profile_path, profile_text
from serve_app.engines.model import SchedulingPolicy
from serve_app.engines.model.hardware import GIB, gpu_names, load_gpu, load_model, model_names
from serve_app.engines.model.roofline import (
    TYPICAL_TOKENS,
    EngineSetup,
    kv_tokens,
    load_profile,
    max_context,
    memory_share,
    min_tensor_parallel,
    profile_names,
    roofline_profile,
    save_profile,
    step_time,
    typical_tokens,
)
from serve_app.engines.model.step_time import attended_pairs
from serve_app.errors import SettingsError
from serve_app.lab.calibration import compare, measured, read_measurements, replay
from serve_app.lab.workloads import RECIPES

MEASUREMENTS = Path(__file__).parents[4] / "shared" / "measurements"
SPLITWISE = MEASUREMENTS / "splitwise_h100_a100_llama2_70b.csv"
RTX4090 = MEASUREMENTS / "rtx4090_llama31_8b" / "requests.jsonl"

# By GPU: largest and root mean square relative error of prefills; range of the errors of decode steps. The
# comments of gpus.yaml and of the profiles have the same figures.
PREFILL_ERROR = {"a100": (0.212, 0.097), "h100": (0.308, 0.114)}
DECODE_ERROR = {"a100": (-0.607, -0.110), "h100": (-0.630, -0.190)}


def setup(model: str = "llama3-70b", gpu: str = "a100", tensor_parallel: int = 4) -> EngineSetup:
    return engine_setup(model, gpu, tensor_parallel)


def splitwise(gpu: str, column: str, *keys: str) -> dict[tuple[int, ...], float]:
    """Return median seconds of the 70B model on a GPU, by the values of the columns `keys`."""
    if not SPLITWISE.exists():
        pytest.skip("the measurements lie beside the project, not in it")
    found = defaultdict(list)
    with SPLITWISE.open() as file:
        for row in csv.DictReader(file):
            if row["model"] == "llama2-70b" and row["hardware"] == f"{gpu}-80gb":
                found[tuple(int(row[key]) for key in keys)].append(float(row[column]) / 1e3)
    return {key: statistics.median(times) for key, times in found.items()}


def single_prompts(gpu: str, column: str) -> dict[tuple[int, ...], float]:
    """Return median seconds by tensor-parallel degree and length of single prompts from 512 tokens."""
    rows = splitwise(gpu, column, "tensor_parallel", "prompt_size", "batch_size")
    return {key[:2]: seconds for key, seconds in rows.items() if key[1] >= 512 and key[2] == 1}


@pytest.mark.parametrize("gpu", PREFILL_ERROR)
def test_prefills_are_as_far_from_the_measured_ones_as_stated(gpu: str) -> None:
    largest, root_mean_square = PREFILL_ERROR[gpu]
    errors = []
    for (tensor_parallel, prompt), seconds in single_prompts(gpu, "prompt_time").items():
        model = step_time(setup("llama2-70b", gpu, tensor_parallel))
        errors.append(model.prefill_s(prompt, max_num_batched_tokens=prompt) / seconds - 1)
    assert len(errors) == 15
    assert max(map(abs, errors)) == pytest.approx(largest, abs=0.005)
    assert statistics.fmean(error**2 for error in errors) ** 0.5 == pytest.approx(root_mean_square, abs=0.005)


@pytest.mark.parametrize("gpu", DECODE_ERROR)
def test_decode_steps_stay_below_those_of_an_engine_that_waits_for_its_host(gpu: str) -> None:
    lowest, highest = DECODE_ERROR[gpu]
    errors = [
        step_time(setup("llama2-70b", gpu, tensor_parallel)).step_s(sequences=1, context_tokens=prompt)
        / seconds
        - 1
        for (tensor_parallel, prompt), seconds in single_prompts(gpu, "token_time").items()
    ]
    assert min(errors) == pytest.approx(lowest, abs=0.005)
    assert max(errors) == pytest.approx(highest, abs=0.005)


def test_the_fitted_70b_profile_is_as_far_from_the_measured_steps_as_stated() -> None:
    model = load_profile("llama2-70b-h100-tp4").step_time
    prefills, decode_steps = [], []
    rows = splitwise("h100", "prompt_time", "tensor_parallel", "prompt_size", "batch_size")
    for (tensor_parallel, prompt, batch), seconds in rows.items():
        if tensor_parallel == 4 and prompt >= 512:
            pairs = batch * attended_pairs(0, prompt)
            prefills.append(model.step_s(prefill_tokens=batch * prompt, attended_pairs=pairs) / seconds - 1)
    rows = splitwise("h100", "token_time", "tensor_parallel", "prompt_size", "batch_size", "token_size")
    for (tensor_parallel, prompt, batch, output), seconds in rows.items():
        if tensor_parallel == 4:
            context = batch * (prompt + output // 2)
            decode_steps.append(model.step_s(sequences=batch, context_tokens=context) / seconds - 1)
    for errors, number, stated in ((prefills, 11, 0.056), (decode_steps, 19, 0.026)):
        assert len(errors) == number
        assert statistics.fmean(error**2 for error in errors) ** 0.5 == pytest.approx(stated, abs=0.0005)


def test_the_context_costs_of_the_fitted_70b_profile_are_the_rooflines() -> None:
    fitted = load_profile("llama2-70b-h100-tp4").step_time
    computed = step_time(setup("llama2-70b", "h100", 4))
    assert fitted.decode_per_context_token_s == pytest.approx(computed.decode_per_context_token_s, rel=1e-3)
    assert fitted.prefill_per_pair_s == pytest.approx(computed.prefill_per_pair_s, rel=1e-3)


def test_a_real_run_on_an_rtx_4090_is_replayed_within_the_stated_error() -> None:
    if not RTX4090.exists():
        pytest.skip("the measured run lies beside the project, not in it")
    requests = read_measurements(RTX4090).requests
    engine = load_profile("llama31-8b-rtx4090-tp1").model_settings()
    played = replay(requests, engine, step_time(setup("llama31-8b", "rtx4090", 1)))
    found = compare(played, measured(requests))
    for metric, error in (("ttft_s", 0.013), ("tpot_s", 0.0), ("e2e_s", 0.010)):
        assert found[metric].errors.mean == pytest.approx(error, abs=0.005)
        assert abs(found[metric].errors.p90) < 0.04


# Published single streams: seconds per token, and the error stated in gpus.yaml.
SINGLE_STREAMS = [
    ("qwen3-1.7b", "a100", 0.0046, 0.01),
    ("qwen3-30b-a3b", "a100", 0.0096, -0.20),
    ("qwen3-4b", "rtx4090", 0.0104, 0.01),
]


@pytest.mark.parametrize(("model", "gpu", "seconds", "error"), SINGLE_STREAMS)
def test_published_single_streams_are_met_as_stated(
    model: str, gpu: str, seconds: float, error: float
) -> None:
    tpot_s = step_time(setup(model, gpu, 1)).step_s(sequences=1, context_tokens=192)
    assert tpot_s / seconds - 1 == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize("name", model_names())
def test_the_layers_add_up_to_the_published_parameters(name: str) -> None:
    model = load_model(name)
    assert model.parameters == pytest.approx(model.published_parameters, rel=0.02)
    active = model.published_active_parameters or model.published_parameters
    # As model cards count: the parameters used per token, and both embeddings.
    used = model.layer_parameters_per_token + 2 * model.embedding_parameters
    if model.tied_embeddings:
        used -= model.embedding_parameters
    assert used == pytest.approx(active, rel=0.02)


def test_the_kv_cache_that_a_real_engine_reported_is_computed() -> None:
    # vLLM 0.19 on an RTX 4090: 41,408 tokens.
    assert kv_tokens(setup("llama31-8b", "rtx4090", 1)) == 41_000


@pytest.mark.parametrize("names", SETUPS, ids=lambda names: profile_name(*names))
def test_weights_and_kv_cache_of_every_profile_fit_into_its_gpus(names: tuple[str, str, int]) -> None:
    wanted = setup(*names)
    profile = load_profile(profile_name(*names))
    held = wanted.model.weights_size + profile.gpus * profile.kv_tokens * wanted.model.kv_size_per_gpu(
        profile.gpus
    )
    assert held < 0.9 * profile.gpus * wanted.gpu.memory_gib * GIB
    assert profile.gpus == wanted.tensor_parallel
    assert profile.max_model_len <= profile.kv_tokens


def test_the_papers_own_setup_does_not_fit() -> None:
    papers = setup("llama3-70b", "a100", 2)
    cache = 65_536 * 16 * papers.model.kv_size_per_gpu(2) * 2
    assert papers.model.weights_size == pytest.approx(141e9, rel=0.01)
    assert cache == pytest.approx(344e9, rel=0.01)
    assert papers.model.weights_size + cache > 2 * 2 * papers.gpu.memory_gib * GIB
    assert 25_000 < kv_tokens(papers) < 30_000
    # Reading the weights takes 34 ms at the peak; the papers' step model says 8.
    assert papers.model.weights_size / (2 * papers.gpu.bandwidth_per_s) > 0.034


def test_a_model_that_does_not_fit_is_rejected_with_the_sum() -> None:
    with pytest.raises(
        SettingsError, match=r"1 GPUs would hold 141\.1 GB of weights.*offers 90% of 85\.0 GB"
    ):
        roofline_profile(setup("llama3-70b", "a100", 1))


@pytest.mark.parametrize("names", SETUPS, ids=lambda names: profile_name(*names))
def test_the_packaged_profile_equals_the_rooflines(names: tuple[str, str, int]) -> None:
    assert profile_path(*names).read_text(encoding="utf-8") == profile_text(*names)
    ours, theirs = load_profile(profile_name(*names)), roofline_profile(setup(*names))
    assert replace(ours, step_time=theirs.step_time) == theirs
    assert ours.step_time.step_s(sequences=8, context_tokens=9_000) == pytest.approx(
        theirs.step_time.step_s(sequences=8, context_tokens=9_000), rel=1e-3
    )


def test_the_files_are_written_with_the_command_in_their_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline_profiles, "_FOLDER", tmp_path)
    roofline_profiles.main(["--write"])
    written = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*/*.yaml")}
    assert written == {profile_name(*names): profile_text(*names) for names in SETUPS}


def test_every_expert_is_read_once_the_batch_is_large() -> None:
    model = setup("qwen3-235b-a22b", "mi300x", 8)
    dense = replace(step_time(model), expert_read_s=0.0, expert_share=0.0, decode_compute_s=0.0)
    mixture = replace(step_time(model), decode_compute_s=0.0)
    read = {n: mixture.step_s(sequences=n) - dense.step_s(sequences=n) for n in (1, 64, 10_000)}
    everything_s = step_time(model).expert_read_s
    assert read[1] == pytest.approx(everything_s * 8 / 128)
    assert read[64] == pytest.approx(everything_s * 0.984, rel=0.001)
    assert read[10_000] == pytest.approx(everything_s)


def test_kv_heads_are_copied_where_there_are_more_gpus_than_heads() -> None:
    model = load_model("qwen3-235b-a22b")
    assert model.kv_size_per_gpu(4) == model.kv_size_per_gpu(8) == 2 * 94 * 128 * 2
    assert 4 * model.kv_size_per_gpu(4) == 192_512


@given(
    sequences=st.integers(1, 256),
    context=st.integers(1, 4_000),
    prompt=st.integers(0, 2_048),
    gpu=st.sampled_from(gpu_names()),
)
def test_no_step_beats_the_peaks_of_the_gpu(sequences: int, context: int, prompt: int, gpu: str) -> None:
    wanted = setup("llama31-8b", gpu, 1)
    seconds = step_time(wanted).step_s(
        sequences=sequences, context_tokens=sequences * context, prefill_tokens=prompt
    )
    model, peak = wanted.model, wanted.gpu
    read = (model.dense_parameters + model.embedding_parameters) * 2 + sequences * context * 131_072
    assert seconds > read / peak.bandwidth_per_s
    assert seconds > 2 * model.dense_parameters * (sequences + prompt) / peak.flops


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "mi300x"])
def test_more_gpus_are_faster_but_less_than_in_proportion(gpu: str) -> None:
    few, many = (step_time(setup("llama3-70b", gpu, degree)) for degree in (4, 8))
    for work in ({"sequences": 32, "context_tokens": 32_000}, {"prefill_tokens": 2_048}):
        assert 1 < few.step_s(**work) / many.step_s(**work) < 2


def test_a_degree_that_does_not_divide_the_heads_is_rejected() -> None:
    with pytest.raises(ValueError, match="must divide the model's 64 attention heads, got 3"):
        setup(tensor_parallel=3)


@pytest.mark.parametrize("utilization", [0.0, 1.1])
def test_a_share_of_memory_is_a_share(utilization: float) -> None:
    with pytest.raises(
        ValueError, match=f"gpu_memory_utilization must be between 0 and 1, got {utilization}"
    ):
        replace(setup(), gpu_memory_utilization=utilization)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"no figures for GPU 'v100'.*a100"):
        load_gpu("v100")
    with pytest.raises(SettingsError, match=r"no figures for model 'gpt'.*llama31-8b"):
        load_model("gpt")


def test_figures_that_cannot_be_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"compute_efficiency must be above 0 and at most 1, got 1\.5"):
        replace(load_gpu("a100"), compute_efficiency=1.5)
    with pytest.raises(ValueError, match="memory_gib must be positive, got 0"):
        replace(load_gpu("a100"), memory_gib=0)
    with pytest.raises(ValueError, match=r"experts_per_token must be between 1 and experts \(1\), got 2"):
        replace(load_model("llama31-8b"), experts_per_token=2)
    with pytest.raises(ValueError, match=r"heads \(32\) must be a multiple of kv_heads \(5\)"):
        replace(load_model("llama31-8b"), kv_heads=5)


# -- capacity: the calculation against known cases, and its typical lengths against named workloads -------


def large(gpus: int = 2, **changes: object) -> EngineSetup:
    return replace(engine_setup("llama3-70b", "h100", gpus), **changes)  # type: ignore[arg-type]


def totals(workload: str) -> np.ndarray:
    requests = RECIPES[workload].generate(workload, 5_000, 1).requests
    return np.array([one.prompt_tokens + one.output_tokens for one in requests])


def test_a_70b_model_on_two_cards_of_80_gb_holds_no_long_context_and_on_four_it_does() -> None:
    held = kv_tokens(large())
    assert 25_000 < held < 35_000
    assert max_context(held) <= held < max_context(held) + 1_024
    assert kv_tokens(large(4)) > 400_000
    assert min_tensor_parallel(large(), 131_072) == 4
    assert min_tensor_parallel(large(), 10**9) is None


def test_gpus_that_cannot_divide_the_heads_are_not_proposed() -> None:
    setup = large()
    odd = replace(setup, model=replace(setup.model, heads=6, kv_heads=6, max_context_len=131_072))
    assert min_tensor_parallel(replace(odd, tensor_parallel=1), 10**9) is None
    assert min_tensor_parallel(replace(odd, tensor_parallel=1), 1_024) == 2


def test_a_cache_of_half_the_bytes_holds_twice_the_tokens() -> None:
    setup = large()
    halved = replace(setup, model=replace(setup.model, kv_bytes=1.0))
    assert kv_tokens(halved) == pytest.approx(2 * kv_tokens(setup), abs=2_000)


def test_a_cache_that_is_given_in_bytes_needs_its_room_beside_the_weights() -> None:
    small = engine_setup("llama31-8b", "h100", 1)
    given = replace(small, kv_cache_memory_bytes=13_107_200_000, gpu_memory_utilization=0.3)
    assert kv_tokens(given) == 100_000
    # 16 GB of weights, 13 GB of cache and the use of CUDA and activations, of 85 GB.
    assert 0.35 < memory_share(given) < 0.40
    assert memory_share(small) == small.gpu_memory_utilization
    too_much = replace(small, kv_cache_memory_bytes=10**12)
    assert kv_tokens(too_much) < 600_000
    assert memory_share(too_much) > 1
    with pytest.raises(SettingsError, match="do not fit"):
        kv_tokens(replace(small, kv_cache_memory_bytes=1_000_000))


def test_the_usual_length_is_that_of_azures_conversations() -> None:
    found = totals("azure-conv")
    assert np.mean(found[found <= 8_192]) == pytest.approx(TYPICAL_TOKENS, rel=0.05)
    assert typical_tokens() == TYPICAL_TOKENS
    assert typical_tokens(at_most=512) == 512


# -- profiles ---------------------------------------------------------------------------------------------

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
