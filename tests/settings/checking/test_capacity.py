"""Capacity warnings of `check` and `serve`: what an engine cannot hold, with figures and remedy."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.settings.application import ApplicationSettings, settings_of
from serve_app.settings.checking import check_capacity, check_file

ROOT = Path(__file__).resolve().parents[3]
LARGE = "meta-llama/Llama-3.3-70B-Instruct"
SMALL = "meta-llama/Llama-3.1-8B-Instruct"


def pool(name: str = "short", *, model: str = LARGE, gpus: float = 2, **args: Any) -> dict[str, Any]:
    if gpus > 1:
        args.setdefault("tensor_parallel_size", int(gpus))
    found: dict[str, Any] = {
        "name": name,
        "engine": {"vllm": {"model": model, "args": args}},
        "resources": {"num_gpus": gpus},
    }
    return found


def application(*pools: dict[str, Any]) -> ApplicationSettings:
    return settings_of({"models": [{"name": "m", "pools": list(pools)}]})


def warned(*pools: dict[str, Any], card: str | None = "h100") -> list[str]:
    return list(check_capacity(application(*pools), card))


def test_a_context_beyond_the_cache_is_reported_with_what_would_hold_it() -> None:
    (output,) = warned(pool(max_model_len=131_072, gpu_memory_utilization=0.9, max_num_batched_tokens=2_048))
    assert output.startswith("models[0].pools[0].engine.vllm.args.max_model_len: a context of 131,072 tokens")
    assert "about 2" in output
    assert "set tensor_parallel_size to 4" in output
    assert "fp8" not in output, "58,000 tokens are too few as well"
    (output,) = warned(pool(max_model_len=30_000))
    assert "set kv_cache_dtype to fp8" in output
    assert warned(pool(max_model_len=30_000, kv_cache_dtype="fp8")) == []


def test_without_a_limit_the_context_is_the_models_own() -> None:
    assert "131,072" in warned(pool())[0]
    assert warned(pool(max_model_len=-1)) == [], "vLLM chooses what fits"
    assert warned(pool(max_model_len="auto")) == []


def test_weights_that_do_not_fit_are_reported_with_the_sum() -> None:
    (output,) = warned(pool(gpus=1, max_model_len=8_192))
    assert output.startswith(
        "models[0].pools[0].engine.vllm.args: on 1 x h100 weights and KV cache do not fit"
    )
    assert "141.1 GB" in output


def test_more_sequences_than_the_cache_carries_are_reported() -> None:
    (output,) = warned(pool(max_model_len=8_192, max_num_seqs=256))
    assert output.startswith(
        "models[0].pools[0].engine.vllm.args.max_num_seqs: 256 sequences of typically 1,400"
    )
    assert "lower it to 2" in output
    assert warned(pool(max_model_len=8_192, max_num_seqs=16)) == []
    # Requests limited to 64 tokens need less.
    assert warned(pool(max_model_len=64, max_num_seqs=256)) == []


def test_engines_that_share_a_card_must_not_claim_more_than_their_fraction() -> None:
    half: dict[str, Any] = {"model": SMALL, "gpus": 0.5, "max_model_len": 8_192}
    (output,) = warned(pool(**half, gpu_memory_utilization=0.6))
    assert output.startswith("models[0].pools[0].resources.num_gpus: an engine with 0.5 of a GPU")
    assert warned(pool(**half, gpu_memory_utilization=0.5)) == []
    assert warned(pool(**half, kv_cache_memory_bytes=10_000_000_000)) == []
    assert "69%" in warned(pool(**half, kv_cache_memory_bytes=40_000_000_000))[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "someone/unknown-model"},
        {"quantization": "awq"},
        {"pipeline_parallel_size": 2},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"dtype": "float8"},
        {"gpu_memory_utilization": "most"},
        {"tensor_parallel_size": 3},
        {"gpus": 0},
    ],
)
def test_unknown_setups_give_no_warning(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"max_model_len": 131_072, "gpu_memory_utilization": 0.9, **changes}
    assert warned(pool(**given)) == []


def test_the_card_is_the_pools_own_or_that_of_the_machine() -> None:
    bad = pool(max_model_len=131_072)
    assert warned(bad, card=None) == []
    assert warned(bad, card="NVIDIA of tomorrow") == []
    assert warned(bad, card="NVIDIA H200") == []
    bad["resources"]["accelerator_type"] = "A100-80G"
    assert "a100" in warned(bad, card=None)[0]
    assert "a100" in warned(bad, card="NVIDIA H200")[0]


def config(tmp_path: Path, *, context: int) -> Path:
    text = (ROOT / "configs/gpu_8x.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("max_model_len: 131072", f"max_model_len: {context}"))
    return path


def test_the_command_warns_with_a_line_and_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, context=600_000)
    line = path.read_text().splitlines().index("                    max_model_len: 600000") + 1
    assert main(["check", "--skip-machine-checks", "--gpu", "H100", str(path)]) == 0
    output = capsys.readouterr()
    assert output.err.startswith(
        f"{path}:{line}: warning: models[0].pools[1].engine.vllm.args.max_model_len: "
    )
    assert output.out == f"{path} is valid, with warnings\n"
    assert main(["check", "--skip-machine-checks", str(path)]) == 0
    assert capsys.readouterr() == (f"{path} is valid\n", "")


def test_an_unknown_card_is_rejected_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--gpu", "voodoo2", "configs/gpu_8x.yaml"])
    assert "'voodoo2' is not a known GPU: use one of a100, h100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cards", "is_warned"),
    [
        (["NVIDIA H100 80GB HBM3"] * 8, True),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], False),
        ([], False),
    ],
)
def test_the_gpus_of_this_machine_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: list[str], is_warned: bool
) -> None:
    monkeypatch.setattr("serve_app.settings.checking.gpu_names", lambda: cards)
    path = config(tmp_path, context=600_000)
    assert bool(check_file(path).warnings) == is_warned
    assert check_file(path, on_this_machine=False).warnings == []


def test_the_start_warns_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, context=600_000)
    text = path.read_text().replace("num_gpus: 4.0}", "num_gpus: 4.0, accelerator_type: H100}")
    # Another mistake in the file rejects the start on any machine, so nothing is started.
    path.write_text(text.replace("http_options:", "http_option:"))
    assert main(["serve", str(path)]) == 2
    output = capsys.readouterr().err
    assert "warning: models[0].pools[1].engine.vllm.args.max_model_len: a context of 600,000 tokens" in output
    assert "http_option is unknown" in output
