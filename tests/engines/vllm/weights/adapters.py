"""LoRA adapters with random weights in PEFT's file format."""

import json
import zlib
from pathlib import Path

_RANK = 8


def write_adapter(model: Path, folder: Path) -> None:
    """Write an adapter of every layer's query and value projections; its weights depend on its name."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    generator = torch.Generator().manual_seed(zlib.crc32(folder.name.encode()))
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(size, _RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": _RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
