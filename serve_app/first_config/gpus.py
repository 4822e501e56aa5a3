"""The pools of vLLM engines on GPUs of this machine."""

from serve_app.first_config.fleet import SHORT_CONTEXT, Gpus
from serve_app.first_config.yaml_text import scalar

_SHORT_SEQUENCES = 256
_LONG_SEQUENCES = 64


def gpu_models(gpus: Gpus) -> str:
    """The list `models`: two pools where the context is long and at least two engines fit."""
    if gpus.context <= SHORT_CONTEXT or gpus.engines < 2:
        why = _WHY_ONE_ENGINE if gpus.engines < 2 else _WHY_ONE_CONTEXT
        pools = _pool(gpus, "all", gpus.context, gpus.engines, _BATCH.format(sequences=_SHORT_SEQUENCES))
        return _MODEL.format(name=scalar(gpus.name), why=why, pools=pools)
    long = max(1, gpus.engines // 4)
    pools = _pool(
        gpus, "short", SHORT_CONTEXT, gpus.engines - long, _BATCH.format(sequences=_SHORT_SEQUENCES)
    )
    pools += "    # The long context. Each sequence takes more KV cache, so fewer run at once.\n"
    pools += _pool(gpus, "long", gpus.context, long, _BATCH_AGAIN.format(sequences=_LONG_SEQUENCES))
    return _MODEL.format(name=scalar(gpus.name), why=_WHY_TWO, pools=pools)


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
            max_num_seqs: {sequences}
            # A long prefill takes at most this much of an iteration, so others keep decoding. About twice
            # what a card computes while a decode step reads the weights; `calibrate` says it exactly.
            long_prefill_token_threshold: 512
"""

_BATCH_AGAIN = """\
            max_num_seqs: {sequences}
            long_prefill_token_threshold: 512
"""


def _pool(gpus: Gpus, name: str, context: int, replicas: int, more: str) -> str:
    parallel = ""
    if gpus.per_engine > 1:
        parallel = f"            tensor_parallel_size: {gpus.per_engine}\n"
    return (
        f"    - name: {name}\n"
        "      engine:\n"
        "        vllm:\n"
        f"          model: {scalar(gpus.model)}\n"
        "          args:\n"
        f"            max_model_len: {context}\n"
        f"{parallel}{more}"
        f"      resources: {{num_cpus: 1.0, num_gpus: {gpus.per_engine}}}\n"
        f"      replicas: {replicas}\n"
        "      health_check_timeout_s: 60.0\n"
    )
