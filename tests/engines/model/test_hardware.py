"""Architectures from `config.json`: known ones agree with the table, unknown ones give no result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.engines.model.hardware import (
    architecture_of,
    find_architecture,
    find_gpu,
    find_model,
    gpu_names,
    load_model,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4_096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIXTURE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2_048,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "use_sliding_window": False,
    "sliding_window": 4_096,
}


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama31-8b"), (MIXTURE, "qwen3-30b-a3b")])
def test_a_published_configuration_gives_the_architecture_of_the_table(
    config: dict[str, Any], name: str
) -> None:
    table = load_model(name)
    unpublished = replace(table, published_parameters=None, published_active_parameters=None, published_as=())
    assert architecture_of(config) == unpublished


def test_weights_in_32_bits_take_twice_the_memory_and_so_does_their_cache() -> None:
    wide = architecture_of({**LLAMA, "torch_dtype": "float32"})
    assert wide is not None
    assert (wide.weight_bytes, wide.kv_bytes) == (4.0, 4.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "deepseek_v3"},
        {"quantization_config": {"quant_method": "awq"}},
        {"sliding_window": 4_096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"torch_dtype": "float8"},
        {"num_hidden_layers": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 5},
    ],
)
def test_unknown_architectures_give_no_result(changes: dict[str, Any]) -> None:
    assert architecture_of({**LLAMA, **changes}) is None


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_a_mixture_whose_layers_differ_gives_no_result(changes: dict[str, Any]) -> None:
    assert architecture_of({**MIXTURE, **changes}) is None


def test_a_folder_speaks_for_itself_and_its_name_counts_where_it_is_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.3-70B-Instruct"
    assert find_architecture(str(folder)) == load_model("llama3-70b")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = find_architecture(str(folder))
    assert found is not None
    assert found.layers == 32
    (folder / "config.json").write_text("{")
    assert find_architecture(str(folder)) is None


def test_a_quantised_relative_is_not_taken_for_a_known_model() -> None:
    assert find_architecture("meta-llama/Llama-3.1-8B-Instruct") == find_model("Llama-3.1-8B-Instruct")
    assert find_model("Llama-3.1-8B-Instruct") == load_model("llama31-8b")
    assert find_architecture("someone/Llama-3.3-70B-Instruct-AWQ") is None


def test_cards_are_found_by_the_names_of_their_driver_and_of_ray() -> None:
    assert find_gpu("NVIDIA H100 80GB HBM3") == "h100"
    assert find_gpu("h200") == find_gpu("H200") == "h200"
    assert find_gpu("NVIDIA A100-SXM4-40GB") is None
    assert all(find_gpu(name) == name for name in gpu_names())
