"""The architecture of a model, from the `config.json` that it is published with.

Only models whose layers are all alike are understood: full attention and a gated feed-forward layer, dense
or a mixture of experts, in 16 or 32 bits. Of any other, such as one with sliding windows, compressed
attention or quantised weights, nothing is said, because the memory that it takes would be guessed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.engine_model.hardware.figures import ModelArchitecture, find_model

_UNDERSTOOD = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"}
_WEIGHT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}


def known_architecture(model: str) -> ModelArchitecture | None:
    """The architecture of a model, by its folder or by its name on the hub; None when it is not known."""
    folder = Path(model).expanduser()
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return find_model(folder.name)
    except (OSError, ValueError):
        return None
    return architecture_of(content) if isinstance(content, Mapping) else None


def architecture_of(config: Mapping[str, Any]) -> ModelArchitecture | None:
    """The architecture that a `config.json` describes; None when it is not one that is understood."""
    if config.get("model_type") not in _UNDERSTOOD or config.get("quantization_config"):
        return None
    if not _attends_to_everything(config):
        return None
    weight_bytes = _WEIGHT_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    feed_forward = _feed_forward(config)
    if weight_bytes is None or feed_forward is None:
        return None
    inner, experts, experts_per_token = feed_forward
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelArchitecture(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            longest_len=int(config["max_position_embeddings"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            weight_bytes=weight_bytes,
            kv_bytes=weight_bytes,
            intermediate=inner,
            experts=experts,
            experts_per_token=experts_per_token,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _attends_to_everything(config: Mapping[str, Any]) -> bool:
    """Whether the KV cache keeps every token in every layer."""
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ())
    return not slides and kinds <= {"full_attention"}


def _feed_forward(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Width, experts and experts per token of the feed-forward layers; None where these are not all alike."""
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    if experts == 1:
        return config.get("intermediate_size", 0), 1, 1
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        return None
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size", 0)
    return inner, experts, config.get("num_experts_per_tok", 1)
