"""The pools of vLLM engines on GPUs of this machine.

Where model and card are known, engines get the batch and, unless it was asked for, the context that their KV
cache carries.
"""

from dataclasses import dataclass

from serve_app.checking.engine_setup import known_setup
from serve_app.engine_model.hardware import find_gpu
from serve_app.engine_model.roofline import capacity, context_that_fits, usual_tokens
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import SettingsError
from serve_app.first_config.fleet import SHORT_CONTEXT, Gpus
from serve_app.first_config.yaml_text import scalar

_SHORT_SEQUENCES = 256
_LONG_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class _Limits:
    """Of one engine, named as in vLLM."""

    max_model_len: int
    max_num_seqs: int
    long_prefill_token_threshold: int = 256


def gpu_models(gpus: Gpus) -> str:
    """The list `models`: two pools where the context is long and at least two engines fit."""
    longest = _limits(gpus, gpus.context, _LONG_SEQUENCES).max_model_len
    if longest <= SHORT_CONTEXT or gpus.engines < 2:
        why = _WHY_ONE_ENGINE if gpus.engines < 2 else _WHY_ONE_CONTEXT
        limits = _limits(gpus, gpus.context, _SHORT_SEQUENCES)
        pools = _pool(gpus, "all", limits, gpus.engines, _BATCH)
        return _MODEL.format(name=scalar(gpus.name), why=why, pools=pools)
    long = max(1, gpus.engines // 4)
    short_limits = _limits(gpus, SHORT_CONTEXT, _SHORT_SEQUENCES)
    pools = _pool(gpus, "short", short_limits, gpus.engines - long, _BATCH)
    pools += "    # The long context. Each sequence takes more KV cache, so fewer run at once.\n"
    pools += _pool(gpus, "long", _limits(gpus, longest, _LONG_SEQUENCES), long, _BATCH_AGAIN)
    return _MODEL.format(name=scalar(gpus.name), why=_WHY_TWO, pools=pools)


def _limits(gpus: Gpus, context: int, sequences: int) -> _Limits:
    """The limits wanted, or what the KV cache carries of them."""
    wanted = {"max_num_seqs": sequences, "tensor_parallel_size": gpus.per_engine}
    card = find_gpu(gpus.card) if gpus.card is not None else None
    setup = known_setup(VllmEngineSettings(model=gpus.model, args=wanted), card) if card is not None else None
    if setup is None:
        return _Limits(context, sequences)
    try:
        held = capacity(setup)
    except SettingsError:
        # Not even the weights fit, which `check` tells with its remedy.
        return _Limits(context, sequences)
    if gpus.max_model_len is None:
        context = min(context, context_that_fits(held))
    carried = max(1, held.sequences(usual_tokens(at_most=context)))
    return _Limits(context, min(sequences, carried), held.chunk_tokens)


_MODEL = """\
- name: {name}
  # Other names for the same model: aliases: [gpt-4o-mini]
  pools:
{why}{pools}"""

_WHY_TWO = """\
    # The pool with the shorter context comes first: requests in it never wait behind a long prefill. How many
    # engines each pool should have depends on the traffic; the command `plan` computes it from a trace.
"""


_WHY_ONE_ENGINE = """\
    # One pool, because one engine fits. Two engines may share a large card: fractions of num_gpus, and
    # gpu_memory_utilization to divide its memory (an example is configs/gpu_1x.yaml).
"""

_WHY_ONE_CONTEXT = """\
    # One pool: a second one pays only where some requests need a longer context.
"""

_BATCH = """\
            # Sequences in one batch: more raise the throughput and make every token a little slower.
            max_num_seqs: {limits.max_num_seqs}
            # A long prefill takes at most this much of an iteration, so others keep decoding. About what a
            # card computes while a decode step reads the weights; `calibrate` says it exactly.
            long_prefill_token_threshold: {limits.long_prefill_token_threshold}
"""

_BATCH_AGAIN = """\
            max_num_seqs: {limits.max_num_seqs}
            long_prefill_token_threshold: {limits.long_prefill_token_threshold}
"""


def _pool(gpus: Gpus, name: str, limits: _Limits, replicas: int, batch: str) -> str:
    parallel = ""
    if gpus.per_engine > 1:
        parallel = f"            tensor_parallel_size: {gpus.per_engine}\n"
    return (
        f"    - name: {name}\n"
        "      engine:\n"
        "        vllm:\n"
        f"          model: {scalar(gpus.model)}\n"
        "          args:\n"
        f"            max_model_len: {limits.max_model_len}\n"
        f"{parallel}{batch.format(limits=limits)}"
        f"      resources: {{num_cpus: 1.0, num_gpus: {gpus.per_engine}}}\n"
        f"      replicas: {replicas}\n"
        "      health_check_timeout_s: 60.0\n"
    )
