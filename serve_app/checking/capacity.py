"""What engines can hold, against what a configuration asks of them: context, sequences.

The figures are those of `engine_model.capacity`: computed, not measured. So these are warnings, which stop
nothing. Nothing is said where the model, the card or the memory that an argument takes is not known.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from serve_app.checking.engine_setup import known_setup, stated
from serve_app.engine_model.hardware import find_gpu
from serve_app.engine_model.roofline import (
    EngineCapacity,
    EngineSetup,
    capacity,
    context_that_fits,
    enough_gpus,
    memory_share,
    usual_tokens,
)
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import SettingsError
from serve_app.settings.application import AppSettings
from serve_app.settings.pools import PoolSettings

_FP8_BYTES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """A pool, and the path of its settings."""

    where: str
    settings: PoolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class _VllmPool:
    """A pool of vLLM engines whose model and card are known.

    Attributes:
        on: the cards in words.
    """

    pool: _Pool
    engine: VllmEngineSettings
    setup: EngineSetup
    held: EngineCapacity
    on: str


def check_capacity(settings: AppSettings, card: str | None = None) -> Iterator[str]:
    """One sentence for each target that an engine cannot reach, beginning with the path of the setting.

    Args:
        card: the GPU of pools that name none in `resources.accelerator_type`; None when it is not known.
    """
    for number, model in enumerate(settings.models):
        for place, pool in enumerate(model.pools):
            if pool.engine.vllm is not None:
                here = _Pool(where=f"models[{number}].pools[{place}]", settings=pool)
                yield from _check_vllm(here, pool.resources.accelerator_type or card)


def _check_vllm(pool: _Pool, card: str | None) -> Iterator[str]:
    engine = pool.settings.engine.vllm
    assert engine is not None, "see check_capacity"
    name = find_gpu(card) if card is not None and pool.settings.resources.num_gpus else None
    setup = known_setup(engine, name) if name is not None else None
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
    """Engines with fractions of `num_gpus` must not claim more memory than that."""
    share, claimed = here.pool.settings.resources.num_gpus, memory_share(here.setup)
    if share < 1 and claimed > share:
        yield (
            f"{here.pool.where}.resources.num_gpus: an engine with {share:g} of a GPU takes about "
            f"{claimed:.0%} of its memory ({here.on}), so engines that share one may not fit: lower "
            "gpu_memory_utilization or kv_cache_memory_bytes, or raise num_gpus"
        )


def _check_context(here: _VllmPool) -> Iterator[str]:
    """A context larger than the KV cache is refused by vLLM itself, minutes after the start."""
    setup, held = here.setup, here.held
    wanted = stated(here.engine, "max_model_len", setup.model.longest_len)
    if wanted is None or wanted <= held.kv_tokens:
        return
    remedies = []
    if (gpus := enough_gpus(setup, wanted)) is not None:
        remedies.append(f"tensor_parallel_size {gpus} holds it")
    halved = replace(setup, model=replace(setup.model, kv_bytes=_FP8_BYTES))
    if setup.model.kv_bytes > _FP8_BYTES and capacity(halved).kv_tokens >= wanted:
        remedies.append("kv_cache_dtype fp8 holds it")
    remedies.append(f"or lower it to {context_that_fits(held)}")
    yield (
        f"{here.pool.where}.engine.vllm.args.max_model_len: a context of {wanted:,} tokens exceeds the KV "
        f"cache of about {held.kv_tokens:,} tokens that {here.on} have beside the weights, and vLLM does not "
        f"start then: {', '.join(remedies)}"
    )


def _check_sequences(here: _VllmPool) -> Iterator[str]:
    """Sequences of usual length, also in a pool of longer ones, which gets them by spill."""
    wanted = stated(here.engine, "max_num_seqs", None)
    usual = usual_tokens(at_most=stated(here.engine, "max_model_len", None))
    most = max(1, here.held.sequences(usual))
    if wanted is not None and wanted > most:
        yield (
            f"{here.pool.where}.engine.vllm.args.max_num_seqs: {wanted} sequences of a usual {usual:,} "
            f"tokens need {wanted * usual:,} tokens of KV cache, and {here.on} have about "
            f"{here.held.kv_tokens:,} beside the weights: lower it to {most}, or give the engine more GPUs"
        )
