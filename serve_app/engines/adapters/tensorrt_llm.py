"""Adapter for TensorRT-LLM, served by `trtllm-serve` or by Triton.

For `trtllm-serve`, `/prometheus/metrics` is read, because `/metrics` returns each statistic only once and a
second reader would miss it. For Triton, `/metrics` is read on the port of its OpenAI frontend.
"""

import re

from serve_app.engines.adapters.server import (
    ControlPages,
    EngineReading,
    EngineServer,
    ReportedLimits,
    count,
    listed_context,
    mean,
    samples,
    total,
)
from serve_app.errors import EngineError

TRITON_REQUESTS = b"nv_trt_llm_request_metrics"
TRITON = b"nv_inference_request_success"
_TRITON_BLOCKS = b"nv_trt_llm_kv_cache_block_metrics"
_PROMETHEUS = "/prometheus/metrics"
_KIND = re.compile(rb'(?:request_type|kv_cache_block_type)="([^"]*)"')


def read(page: bytes) -> EngineReading:
    """Parse `/prometheus/metrics`. The page is empty before the first request.

    Raises:
        EngineError: the page is not that of `trtllm-serve`.
    """
    if page.strip() and b"trtllm_" not in page:
        raise EngineError("the metrics have no name that begins with trtllm_: is it trtllm-serve?")
    blocks = total(page, b"trtllm_kv_cache_max_blocks") or 0.0
    block_tokens = mean(page, b"trtllm_kv_cache_tokens_per_block") or 0.0
    return EngineReading(
        waiting=count(page, b"trtllm_num_requests_waiting"),
        running=count(page, b"trtllm_num_requests_running"),
        kv_usage_ratio=mean(page, b"trtllm_kv_cache_utilization"),
        kv_tokens=round(blocks * block_tokens) or None,
        max_num_seqs=count(page, b"trtllm_max_num_active_requests") or None,
        # trtllm-serve observes this histogram once per request.
        token_gaps=count(page, b"trtllm_time_per_output_token_seconds_count"),
        token_gaps_s=total(page, b"trtllm_time_per_output_token_seconds_sum"),
    )


def read_triton(page: bytes) -> EngineReading:
    """Parse Triton's `/metrics`, summed over its models.

    Raises:
        EngineError: the page has no TensorRT-LLM statistics.
    """
    requests, blocks = _by_kind(page, TRITON_REQUESTS), _by_kind(page, _TRITON_BLOCKS)
    if b"active" not in requests:
        raise EngineError(f"the metrics have no {TRITON_REQUESTS.decode()}: is it Triton with TensorRT-LLM?")
    # Releases before 24.08 do not report waiting requests: those that are active but not in the batch.
    running = requests.get(b"scheduled", 0.0)
    waiting = requests.get(b"waiting", max(requests[b"active"] - running, 0.0))
    capacity = blocks.get(b"max", 0.0) * blocks.get(b"tokens_per", 0.0)
    return EngineReading(
        waiting=round(waiting),
        running=round(running),
        kv_usage_ratio=blocks[b"used"] / blocks[b"max"] if blocks.get(b"max") and b"used" in blocks else None,
        kv_tokens=round(capacity) or None,
        max_num_seqs=round(requests.get(b"max", 0.0)) or None,
    )


async def describe(pages: ControlPages) -> EngineServer:
    """Return the description of a `trtllm-serve` server."""
    return EngineServer(
        kind="TensorRT-LLM",
        version=await pages.string_field("/version", "version"),
        limits=ReportedLimits(max_model_len=listed_context(await pages.models())),
        metrics_path=_PROMETHEUS if (await pages.answer(_PROMETHEUS)).status == 200 else None,
        reader=read,
    )


async def describe_triton(pages: ControlPages) -> EngineServer:
    """Return the description of Triton's OpenAI frontend. Only the TensorRT-LLM backend exposes its load."""
    return EngineServer(
        kind="Triton",
        limits=ReportedLimits(max_model_len=listed_context(await pages.models())),
        metrics_path="/metrics" if TRITON_REQUESTS in await pages.text("/metrics") else None,
        health_path="/health/ready",
        reader=read_triton,
    )


def _by_kind(page: bytes, name: bytes) -> dict[bytes, float]:
    """Return a metric's values by request or block type, such as `active` or `max`, summed over models."""
    sums: dict[bytes, float] = {}
    for written, value in samples(page, name):
        if match := _KIND.search(written):
            kind = match.group(1)
            sums[kind] = sums.get(kind, 0.0) + value
    return sums
