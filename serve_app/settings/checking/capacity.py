"""The capacity of vLLM engines, compared with the context and sequences that a configuration requires.

The values are computed by `roofline.capacity`, not measured. So the results are warnings, and there are none
if the model, the GPU or the memory of an argument is not known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from serve_app.engines.model.hardware import Gpu, ModelArchitecture, find_architecture, find_gpu, load_gpu
from serve_app.engines.model.roofline import (
    EngineCapacity,
    EngineSetup,
    capacity,
    max_context,
    memory_share,
    min_tensor_parallel,
    typical_tokens,
)
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import SettingsError
from serve_app.settings.application import ApplicationSettings, PoolSettings

# Defaults of vLLM 0.32 and 0.33: share of the memory, and tokens and sequences of a batch by GPU.
_MEMORY_UTILIZATION = 0.92
_HUGE_GIB, _LARGE_GIB = 160, 70
_HUGE_BATCH, _LARGE_BATCH, _DEFAULT_BATCH = (16_384, 1_024), (8_192, 1_024), (2_048, 256)

_WEIGHT_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("bfloat16", "float16", "half"), 2.0),
    **dict.fromkeys(("float32", "float"), 4.0),
}
_KV_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1.0),
    **dict.fromkeys(("bfloat16", "float16"), 2.0),
}
# Arguments that affect memory, or its division, in ways that are not modelled.
_NOT_MODELLED = (
    *("quantization", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"),
    *("prefill_context_parallel_size", "cpu_offload_gb", "speculative_config", "enable_lora"),
    *("num_gpu_blocks_override", "hf_overrides", "kv_offloading_size"),
)

_FP8_BYTES = 1.0


def engine_setup(engine: VllmEngineSettings, gpu: str) -> EngineSetup | None:
    """Return the model, GPUs and memory-related arguments of an engine; None if any of them is not known."""
    if any(engine.args.get(name) not in (None, False, 0, 1) for name in _NOT_MODELLED):
        return None
    figures = load_gpu(gpu)
    model = _model(engine)
    tokens, sequences = _batch(gpu, figures)
    share = engine.args.get("gpu_memory_utilization", _MEMORY_UTILIZATION)
    counts = {
        "tensor_parallel": positive_argument(engine, "tensor_parallel_size", 1),
        "max_num_seqs": positive_argument(engine, "max_num_seqs", sequences),
        "max_num_batched_tokens": positive_argument(engine, "max_num_batched_tokens", tokens),
    }
    if model is None or not isinstance(share, float | int):
        return None
    given = {name: count for name, count in counts.items() if count is not None}
    if len(given) < len(counts):
        return None
    try:
        return EngineSetup(
            model=model,
            gpu=figures,
            gpu_memory_utilization=float(share),
            kv_cache_memory_bytes=positive_argument(engine, "kv_cache_memory_bytes", None),
            **given,
        )
    except ValueError:
        # vLLM rejects these as well and reports why.
        return None


def positive_argument(engine: VllmEngineSettings, name: str, default: int | None) -> int | None:
    """Return a positive integer argument or the default; None if vLLM chooses the value (`auto`, -1)."""
    value = engine.args.get(name, default)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value > 0 else None


def _model(engine: VllmEngineSettings) -> ModelArchitecture | None:
    model = find_architecture(engine.model)
    if model is None:
        return None
    dtype, kv_dtype = str(engine.args.get("dtype", "auto")), str(engine.args.get("kv_cache_dtype", "auto"))
    weight_bytes = model.weight_bytes if dtype == "auto" else _WEIGHT_BYTES.get(dtype)
    kv_bytes = weight_bytes if kv_dtype == "auto" else _KV_BYTES.get(kv_dtype)
    if weight_bytes is None or kv_bytes is None:
        return None
    return replace(model, weight_bytes=weight_bytes, kv_bytes=kv_bytes)


def _batch(name: str, gpu: Gpu) -> tuple[int, int]:
    """Return vLLM's default tokens and sequences of a batch for a GPU."""
    if gpu.memory_gib >= _HUGE_GIB:
        return _HUGE_BATCH
    if gpu.memory_gib >= _LARGE_GIB and name != "a100":
        return _LARGE_BATCH
    return _DEFAULT_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """A pool, and the path of its settings."""

    where: str
    settings: PoolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class _VllmPool:
    """A pool of vLLM engines whose model and GPU are known.

    Attributes:
        on: description of the GPUs.
    """

    pool: _Pool
    engine: VllmEngineSettings
    setup: EngineSetup
    held: EngineCapacity
    on: str


def check_capacity(settings: ApplicationSettings, gpu: str | None = None) -> Iterator[str]:
    """Yield a sentence for each limit that an engine cannot reach, starting with the setting's path.

    Args:
        gpu: GPU of pools without `resources.accelerator_type`; None if not known.
    """
    for number, model in enumerate(settings.models):
        for place, pool in enumerate(model.pools):
            if pool.engine.vllm is not None:
                here = _Pool(where=f"models[{number}].pools[{place}]", settings=pool)
                yield from _check_vllm(here, pool.resources.accelerator_type or gpu)


def _check_vllm(pool: _Pool, gpu: str | None) -> Iterator[str]:
    engine = pool.settings.engine.vllm
    assert engine is not None, "see check_capacity"
    name = find_gpu(gpu) if gpu is not None and pool.settings.resources.num_gpus else None
    setup = engine_setup(engine, name) if name is not None else None
    if setup is None:
        return
    on = f"{setup.tensor_parallel} x {name}"
    try:
        held = capacity(setup)
    except SettingsError as exc:
        yield f"{pool.where}.engine.vllm.args: on {on} {exc}"
        return
    here = _VllmPool(pool=pool, engine=engine, setup=setup, held=held, on=on)
    yield from _check_sharing(here)
    yield from _check_context(here)
    yield from _check_sequences(here)


def _check_sharing(here: _VllmPool) -> Iterator[str]:
    """Check that engines with fractions of `num_gpus` use no more memory than that share."""
    share, claimed = here.pool.settings.resources.num_gpus, memory_share(here.setup)
    if share < 1 and claimed > share:
        yield (
            f"{here.pool.where}.resources.num_gpus: an engine with {share:g} of a GPU uses about "
            f"{claimed:.0%} of its memory ({here.on}), so engines that share a GPU may not fit: lower "
            "gpu_memory_utilization or kv_cache_memory_bytes, or raise num_gpus"
        )


def _check_context(here: _VllmPool) -> Iterator[str]:
    """Check that the KV cache holds the context. vLLM would reject it only minutes after the start."""
    setup, held = here.setup, here.held
    wanted = positive_argument(here.engine, "max_model_len", setup.model.max_context_len)
    if wanted is None or wanted <= held.kv_tokens:
        return
    remedies = []
    if (gpus := min_tensor_parallel(setup, wanted)) is not None:
        remedies.append(f"set tensor_parallel_size to {gpus}")
    halved = replace(setup, model=replace(setup.model, kv_bytes=_FP8_BYTES))
    if setup.model.kv_bytes > _FP8_BYTES and capacity(halved).kv_tokens >= wanted:
        remedies.append("set kv_cache_dtype to fp8")
    remedies.append(f"or lower max_model_len to {max_context(held)}")
    yield (
        f"{here.pool.where}.engine.vllm.args.max_model_len: a context of {wanted:,} tokens exceeds the KV "
        f"cache of about {held.kv_tokens:,} tokens that {here.on} have besides the weights, so vLLM will not "
        f"start: {', '.join(remedies)}"
    )


def _check_sequences(here: _VllmPool) -> Iterator[str]:
    """Check `max_num_seqs` for sequences of typical length, which pools of longer ones receive by spill."""
    wanted = positive_argument(here.engine, "max_num_seqs", None)
    usual = typical_tokens(at_most=positive_argument(here.engine, "max_model_len", None))
    most = max(1, here.held.sequences(usual))
    if wanted is not None and wanted > most:
        yield (
            f"{here.pool.where}.engine.vllm.args.max_num_seqs: {wanted} sequences of typically {usual:,} "
            f"tokens need {wanted * usual:,} tokens of KV cache, but {here.on} have about "
            f"{here.held.kv_tokens:,} besides the weights: lower it to {most}, or use more GPUs per engine"
        )
