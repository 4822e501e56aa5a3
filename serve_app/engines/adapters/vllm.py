"""Adapter for vLLM 0.6 and later: reads `/metrics` and the model list.

The model list has the context limit, and the labels of a metric have the KV cache size. vLLM does not expose
`--max-num-seqs`.
"""

import functools
from urllib.parse import urlencode

from serve_app.engines.adapters.server import (
    ControlPages,
    EngineReading,
    EngineServer,
    ReportedLimits,
    count,
    labels,
    listed_context,
    mean,
    samples,
    total,
)
from serve_app.errors import EngineError

RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_CACHE_CONFIG = b"vllm:cache_config_info"
# Newest name first, because a server may expose the old name in addition to the new one.
_KV_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_TOKEN_GAPS = (b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds")
_STEPS = b"vllm:iteration_tokens_total_count"
_SLEEP_STATE = b"vllm:engine_sleep_state"
_GAPS_SUM = tuple(name + b"_sum" for name in _TOKEN_GAPS)
_GAPS_COUNT = tuple(name + b"_count" for name in _TOKEN_GAPS)
# Behind the slash is the Prometheus library's own page, which collects only samples of these names. The whole
# page takes ten times as long on the event loop that also streams the tokens.
_READ = (RUNNING, _WAITING, _CACHE_CONFIG, *_KV_USAGE, _STEPS, _SLEEP_STATE, *_GAPS_SUM, *_GAPS_COUNT)
SELECTED_METRICS = "/metrics/?" + urlencode([("name[]", name) for name in _READ])


def read(page: bytes) -> EngineReading:
    """Parse `/metrics`, summed over engine cores.

    Raises:
        EngineError: the page has no vLLM gauges.
    """
    waiting, running, usage = count(page, _WAITING), count(page, RUNNING), mean(page, *_KV_USAGE)
    if waiting is None or running is None or usage is None:
        raise EngineError(
            f"the metrics have no {RUNNING.decode()}, {_WAITING.decode()} or {_KV_USAGE[0].decode()}: is it "
            "a vLLM server (0.6 or later) that logs statistics?"
        )
    cores = samples(page, _CACHE_CONFIG)
    return EngineReading(
        waiting=waiting,
        running=running,
        kv_usage_ratio=usage,
        token_gaps=count(page, *_GAPS_COUNT) or 0,
        token_gaps_s=total(page, *_GAPS_SUM) or 0.0,
        steps=count(page, _STEPS),
        # One sample for each state and core; that of the current state is 1.
        sleeps=any(
            b'sleep_state="awake"' in written and not value for written, value in samples(page, _SLEEP_STATE)
        ),
        # The samples of all cores have the same values in their labels.
        kv_tokens=_kv_tokens(cores[0][0], len(cores)) if cores else None,
    )


def kv_capacity_tokens(size_tokens: int | None, num_blocks: int, block_size: int, cores: int = 1) -> int:
    """Return the tokens in the KV caches of all engine cores; 0 for a model without a KV cache.

    Args:
        size_tokens: cache size of one core as vLLM reports it; None for releases that do not.
        num_blocks: blocks of all cores. Hybrid models have blocks of different sizes, so `size_tokens` takes
            precedence.
        cores: engine cores (data parallel ranks). Each reserves one block as padding.
    """
    total_tokens = num_blocks * block_size if size_tokens is None else size_tokens * cores
    return max(total_tokens - cores * block_size, 0)


async def describe(pages: ControlPages) -> EngineServer:
    """Return the server's description of itself."""
    return EngineServer(
        kind="vLLM",
        version=await pages.string_field("/version", "version"),
        limits=ReportedLimits(max_model_len=listed_context(await pages.models())),
        metrics_path=await _metrics_path(pages),
        reader=read,
        names_responses=True,
    )


async def _metrics_path(pages: ControlPages) -> str | None:
    # Several API servers share their metrics in files, from which the library cannot select. A server with
    # `--disable-log-stats` has no metrics but can serve requests.
    for path in (SELECTED_METRICS, "/metrics"):
        if RUNNING in await pages.text(path):
            return path
    return None


@functools.lru_cache(maxsize=4096)
def _kv_tokens(written: bytes, cores: int) -> int | None:
    """Return the capacity over all cores, or None if not reported. Cached, because it never changes."""
    values = labels(written)
    blocks, block_size, size = (
        int(value) if (value := values.get(name, "")).isdigit() else None
        for name in ("num_gpu_blocks", "block_size", "kv_cache_size_tokens")
    )
    if blocks is None or block_size is None:
        return None
    return kv_capacity_tokens(size, blocks, block_size, cores) or None
