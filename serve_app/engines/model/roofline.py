"""Step times of known hardware: measured profiles, and the roofline.

- `EngineProfile`: step times and limits of a model on its GPUs.
- `step_time`: the roofline: step times of a model on some GPUs, computed from data sheets.
- `kv_tokens`: the KV cache of an engine, from a model, a GPU and the engine's arguments.

`EngineProfile`. A profile is a YAML file that states the source of its values; `calibrate` writes them.
Built-in profiles are in `profile_data`, one folder per model, and are loaded by name (`model-gpu-tpN`).
Others are loaded by path.

`step_time`. A step spends time in three ways on each of T tensor-parallel GPUs, which share weights and
heads:

    read weights      bytes of the layers and of the output layer / T / (bandwidth * efficiency)
    compute tokens    2 * parameters that a token is multiplied with / T / (flops * efficiency)
    attend            4 * layers * heads * head_dim operations per pair of tokens (prefill, bound by compute),
                      or reading the KV cache of the context (decode, bound by memory)

Some times do not shrink with T: a fixed time per layer, per step and per sequence, and two all-reduces per
layer. An all-reduce costs its latency in a decode step, and its bytes in a prefill: 2 (T - 1) / T of the
hidden state, as in a ring. Weights are read while tokens are computed, so the larger time counts
(`step_time`).

Mixtures of experts: a token is multiplied with its own k of E experts, but an engine reads every expert to
which any token of the batch is routed. With N tokens and uniform routing that is the share
1 - (1 - k / E) ** N. For 64 sequences and 8 of 128 experts it is 98 %, close to a dense model of that size.

Memory: weights, KV cache and overheads must fit into `gpu_memory_utilization` of the GPUs' memory.
Token-budget pool routing (arXiv 2604.09613) assumes a 70B model on two A100 of 80 GB with 65,536 blocks of 16
tokens. In 16 bits that needs 141 GB + 65,536 * 16 * 320 KiB = 344 GB, together 485 GB on GPUs of 160 GB;
about 28,000 tokens fit. Its step of 8 ms is not achievable either: two A100 need 34 ms to read the weights at
peak bandwidth.

Not modelled: queues, the engine's scheduling, quantised weights, and kernels that are slow at some shapes.
`gpus.yaml` states which of its values were measured, and their errors.

`kv_tokens`. vLLM rejects a `max_model_len` larger than its KV cache, but accepts a `max_num_seqs` that the
cache cannot hold and that is never reached. The result is within 1 % of what vLLM 0.19 reported for an 8B
model on an RTX 4090. The number of sequences depends on their length; `typical_tokens` is the assumption for
unknown traffic.
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.core.settings_base import settings
from serve_app.engines.model.hardware import GIB, Gpu, ModelArchitecture
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import SettingsError

_DATA = resources.files("serve_app.engines.model") / "profile_data"


@settings
class EngineProfile:
    """One engine: a model on its GPUs.

    Attributes:
        step_time: duration of its iterations.
        kv_tokens: capacity of the KV cache, in tokens.
        max_model_len: context limit, in tokens.
        max_num_seqs: maximum number of sequences in a batch.
        max_num_batched_tokens: maximum number of tokens computed per iteration.
        gpus: GPUs per engine.
    """

    step_time: StepTimeModel
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    gpus: int = 1

    def model_settings(self, **overrides: Any) -> EngineModelSettings:
        """Return engine model settings for this profile. Overrides that are None are ignored."""
        values: dict[str, Any] = {
            "kv_tokens": self.kv_tokens,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        values |= {name: value for name, value in overrides.items() if value is not None}
        return EngineModelSettings(**values)


_ADAPTER = TypeAdapter(EngineProfile)


def profile_names() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted(_shipped())


def load_profile(name_or_path: str) -> EngineProfile:
    """Load a profile by name, or from a YAML file.

    Raises:
        SettingsError: there is no such profile, or the file is not a profile.
    """
    if name_or_path in _shipped():
        text = _shipped()[name_or_path].read_text(encoding="utf-8")
    elif name_or_path.endswith((".yaml", ".yml")) and Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        near = difflib.get_close_matches(name_or_path, profile_names(), n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(profile_names())}"
        raise SettingsError(
            f"no engine profile {name_or_path!r}: {advice} A path of a YAML file is also accepted"
        )
    try:
        return _ADAPTER.validate_python(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{name_or_path} is not an engine profile: {error}") from error


def save_profile(profile: EngineProfile, path: Path, *, source: str) -> None:
    """Write a profile for `load_profile`, with the source of its values as a comment."""
    comment = "".join(f"# {line}\n" for line in source.splitlines())
    path.write_text(comment + yaml.safe_dump(asdict(profile), sort_keys=False), encoding="utf-8")


@cache
def _shipped() -> Mapping[str, Traversable]:
    """Return the files of the built-in profiles by name."""
    files = [file for model in _DATA.iterdir() if model.is_dir() for file in model.iterdir()]
    return {file.name.removesuffix(".yaml"): file for file in files}


# Driver and library context, CUDA graphs, communication buffers. With this value an 8B model on an RTX 4090
# gets the KV cache that vLLM 0.19 reported.
_RESERVED_PER_GPU = 0.65 * GIB
# Logits and their softmax, 32 bits each.
_LOGIT_BYTES = 8
_ROUND_KV_TOKENS = 1_000
_ROUND_LEN = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """A model on its GPUs, with the engine settings that affect memory, named as in vLLM.

    Attributes:
        tensor_parallel: GPUs that share every layer.
        gpu_memory_utilization: share of the memory that the engine may use (0-1).
        kv_cache_memory_bytes: bytes of KV cache per GPU; None for what `gpu_memory_utilization` leaves.
    """

    model: ModelArchitecture
    gpu: Gpu
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.model.heads % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel must divide the model's {self.model.heads} attention heads, "
                f"got {self.tensor_parallel}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be between 0 and 1, got {self.gpu_memory_utilization}"
            )


def step_time(setup: EngineSetup) -> StepTimeModel:
    """Return the roofline of one iteration."""
    model, gpu, gpus = setup.model, setup.gpu, setup.tensor_parallel
    read_per_s = gpus * gpu.bandwidth_per_s * gpu.bandwidth_efficiency
    computed_per_s = gpus * gpu.flops * gpu.compute_efficiency
    is_mixture = model.experts > 1
    # Every prompt token passes through the layers, only the last one through the output layer.
    read_always = (model.dense_parameters + model.embedding_parameters) * model.weight_bytes
    base_s = read_always / read_per_s + gpu.step_s + model.layers * gpu.layer_s
    if gpus > 1:
        base_s += 2 * model.layers * gpu.all_reduce_s
    exchange_s = _exchange_s(setup)
    attention = 4 * model.layers * model.heads * model.head_dim
    return StepTimeModel(
        decode_base_s=base_s,
        decode_per_sequence_s=gpu.sequence_s,
        decode_per_context_token_s=model.kv_size_per_gpu(gpus) * gpus / read_per_s,
        prefill_base_s=base_s,
        prefill_per_token_s=2 * model.layer_parameters_per_token / computed_per_s + exchange_s,
        prefill_per_pair_s=attention / (gpus * gpu.flops * gpu.attention_efficiency),
        decode_compute_s=2 * (model.layer_parameters_per_token + model.embedding_parameters) / computed_per_s
        + exchange_s,
        expert_read_s=model.expert_parameters * model.weight_bytes / read_per_s,
        expert_share=model.experts_per_token / model.experts if is_mixture else 0.0,
    )


def _exchange_s(setup: EngineSetup) -> float:
    """Return the seconds per token to transfer the hidden states of two all-reduces per layer."""
    gpus = setup.tensor_parallel
    sent = 2 * (gpus - 1) / gpus * setup.model.hidden * setup.model.weight_bytes
    return 2 * setup.model.layers * sent / (setup.gpu.link_per_s * setup.gpu.link_efficiency)


def kv_tokens(setup: EngineSetup) -> int:
    """Return the tokens of KV cache that fit in addition to the weights, rounded down to thousands.

    Raises:
        SettingsError: not one sequence of 1,024 tokens fits; the message states the calculation.
    """
    model, gpus = setup.model, setup.tensor_parallel
    memory = setup.gpu.memory_gib * GIB
    weights, other = model.weights_size / gpus, _other_size(setup)
    left = memory * setup.gpu_memory_utilization - weights - other
    if setup.kv_cache_memory_bytes is not None:
        left = min(setup.kv_cache_memory_bytes, memory - weights - other)
    tokens = int(left / model.kv_size_per_gpu(gpus))
    if tokens < _ROUND_LEN:
        needed = weights + other + _ROUND_LEN * model.kv_size_per_gpu(gpus)
        raise SettingsError(
            f"weights and KV cache do not fit: each of {gpus} GPUs would hold {weights / 1e9:.1f} GB of "
            f"weights, {other / 1e9:.1f} GB of activations and reserve, and {_ROUND_LEN:,} tokens of KV "
            f"cache, together {needed / 1e9:.1f} GB, and offers {setup.gpu_memory_utilization:.0%} of "
            f"{memory / 1e9:.1f} GB: take more GPUs, larger ones, or fewer bytes per weight"
        )
    return tokens // _ROUND_KV_TOKENS * _ROUND_KV_TOKENS


def memory_share(setup: EngineSetup) -> float:
    """Return the share of each GPU's memory that the engine uses: 0-1, or more if it does not fit."""
    if setup.kv_cache_memory_bytes is None:
        return setup.gpu_memory_utilization
    weights = setup.model.weights_size / setup.tensor_parallel
    return (weights + _other_size(setup) + setup.kv_cache_memory_bytes) / (setup.gpu.memory_gib * GIB)


def _other_size(setup: EngineSetup) -> float:
    """Return the bytes that each GPU needs in addition to weights and KV cache."""
    model = setup.model
    # Each GPU holds the whole residual stream and its share of the feed-forward layer, or of k experts.
    inner = 3 * model.intermediate * model.experts_per_token / setup.tensor_parallel
    activations = setup.max_num_batched_tokens * (4 * model.hidden + inner) * model.weight_bytes
    logits = setup.max_num_seqs * model.vocabulary * _LOGIT_BYTES
    return _RESERVED_PER_GPU + activations + logits


def roofline_profile(setup: EngineSetup) -> EngineProfile:
    """Return the profile of an engine without measurements.

    Raises:
        SettingsError: weights and KV cache do not fit into the GPUs' memory.
    """
    tokens = kv_tokens(setup)
    return EngineProfile(
        step_time=step_time(setup),
        kv_tokens=tokens,
        max_model_len=min(setup.model.max_context_len, max_context(tokens)),
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        gpus=setup.tensor_parallel,
    )


TYPICAL_TOKENS = 1_400
"""Prompt and output of a typical request: the mean of Azure's 2023 conversations, up to 8,192 tokens."""

_WIDER = (2, 4, 8, 16)


def typical_tokens(*, at_most: int | None = None) -> int:
    """Return the prompt and output tokens of a typical request, at most the engine's context limit."""
    return TYPICAL_TOKENS if at_most is None else min(TYPICAL_TOKENS, at_most)


def max_context(tokens: int) -> int:
    """Return the largest `max_model_len` for a KV cache of `tokens`, rounded down to a multiple of 1,024."""
    return tokens // _ROUND_LEN * _ROUND_LEN


def min_tensor_parallel(setup: EngineSetup, tokens: int) -> int | None:
    """Return the smallest tensor-parallel degree that holds `tokens` of KV cache; None if 16 is too few."""
    for gpus in _WIDER:
        if gpus <= setup.tensor_parallel or setup.model.heads % gpus:
            continue
        wider = replace(setup, tensor_parallel=gpus)
        try:
            if kv_tokens(wider) >= tokens:
                return gpus
        except SettingsError:
            continue
    return None
