"""A vLLM engine of a configuration as the roofline sees it: model, cards, and arguments that need memory."""

from collections.abc import Mapping
from dataclasses import replace

from serve_app.engine_model.hardware import Gpu, ModelArchitecture, known_architecture, load_gpu
from serve_app.engine_model.roofline import EngineSetup
from serve_app.engines.vllm.engine import VllmEngineSettings

# Defaults of vLLM 0.32 and 0.33: the share of the memory, and tokens and sequences of a batch by the card.
_MEMORY_UTILIZATION = 0.92
_HUGE_GIB, _LARGE_GIB = 160, 70
_HUGE_BATCH, _LARGE_BATCH, _USUAL_BATCH = (16_384, 1_024), (8_192, 1_024), (2_048, 256)

_WEIGHT_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("bfloat16", "float16", "half"), 2.0),
    **dict.fromkeys(("float32", "float"), 4.0),
}
_KV_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1.0),
    **dict.fromkeys(("bfloat16", "float16"), 2.0),
}
# Arguments that change what memory is needed, or how it is divided, in ways that are not modelled.
_NOT_MODELLED = (
    *("quantization", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
    *("prefill_context_parallel_size", "cpu_offload_gb", "speculative_config", "enable_lora"),
    *("num_gpu_blocks_override", "hf_overrides", "kv_offloading_size"),
)


def known_setup(engine: VllmEngineSettings, gpu: str) -> EngineSetup | None:
    """A model on its cards, with the arguments that memory depends on; None where something is not known."""
    if any(engine.args.get(name) not in (None, False, 0, 1) for name in _NOT_MODELLED):
        return None
    card = load_gpu(gpu)
    model = _model(engine)
    tokens, sequences = _batch(gpu, card)
    share = engine.args.get("gpu_memory_utilization", _MEMORY_UTILIZATION)
    counts = {
        "tensor_parallel": stated(engine, "tensor_parallel_size", 1),
        "max_num_seqs": stated(engine, "max_num_seqs", sequences),
        "max_num_batched_tokens": stated(engine, "max_num_batched_tokens", tokens),
    }
    if model is None or not isinstance(share, float | int):
        return None
    given = {name: count for name, count in counts.items() if count is not None}
    if len(given) < len(counts):
        return None
    try:
        return EngineSetup(
            model=model,
            gpu=card,
            gpu_memory_utilization=float(share),
            kv_cache_memory_bytes=stated(engine, "kv_cache_memory_bytes", None),
            **given,
        )
    except ValueError:
        # vLLM refuses these as well, in its own words.
        return None


def stated(engine: VllmEngineSettings, name: str, default: int | None) -> int | None:
    """A number among the arguments; the default where it is absent, None where vLLM chooses (`auto`, -1)."""
    value = engine.args.get(name, default)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value > 0 else None


def _model(engine: VllmEngineSettings) -> ModelArchitecture | None:
    model = known_architecture(engine.model)
    if model is None:
        return None
    dtype, kv_dtype = str(engine.args.get("dtype", "auto")), str(engine.args.get("kv_cache_dtype", "auto"))
    weight_bytes = model.weight_bytes if dtype == "auto" else _WEIGHT_BYTES.get(dtype)
    kv_bytes = weight_bytes if kv_dtype == "auto" else _KV_BYTES.get(kv_dtype)
    if weight_bytes is None or kv_bytes is None:
        return None
    return replace(model, weight_bytes=weight_bytes, kv_bytes=kv_bytes)


def _batch(name: str, card: Gpu) -> tuple[int, int]:
    """Tokens and sequences of a batch that vLLM's server takes where none are given."""
    if card.memory_gib >= _HUGE_GIB:
        return _HUGE_BATCH
    if card.memory_gib >= _LARGE_GIB and name != "a100":
        return _LARGE_BATCH
    return _USUAL_BATCH
