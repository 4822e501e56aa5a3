"""Adapter for SGLang: reads `/metrics` if the server runs with `--enable-metrics`, otherwise its load page.

SGLang reports its limits on `/server_info`, in older releases on `/get_server_info`. The ranks of one engine
may each report the same values, so one sample of each data parallel rank counts.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.engines.adapters.server import (
    ControlPages,
    EngineReading,
    EngineServer,
    ReportedLimits,
    count,
    first_of_each,
    listed_context,
    positive_int,
    samples,
    total,
)
from serve_app.errors import EngineError

# Newer releases use an underscore, older ones a colon.
RUNNING = (b"sglang:num_running_reqs", b"sglang_num_running_reqs")
_DATA_PARALLEL = b"dp_rank"
# Newest first.
_INFO_PAGES = ("/server_info", "/get_server_info")
_LOAD_PAGES = ("/v1/loads?include=core", "/get_load")


def read_metrics(page: bytes, prefix: bytes) -> EngineReading:
    """Parse `/metrics`, summed over data parallel ranks.

    Args:
        prefix: of the metric names, `sglang:` or `sglang_`.

    Raises:
        EngineError: the page has no SGLang gauges.
    """
    running, waiting, usage, capacity = (
        first_of_each(samples(page, prefix + name), _DATA_PARALLEL)
        for name in (b"num_running_reqs", b"num_queue_reqs", b"token_usage", b"max_total_num_tokens")
    )
    if not running or not waiting:
        raise EngineError(
            f"the metrics have no {prefix.decode()}num_running_reqs or num_queue_reqs: is it an SGLang "
            "server with --enable-metrics?"
        )
    return EngineReading(
        waiting=round(sum(waiting)),
        running=round(sum(running)),
        kv_usage_ratio=sum(usage) / len(usage) if usage else None,
        kv_tokens=round(sum(capacity)) or None,
        token_gaps=count(page, prefix + b"inter_token_latency_seconds_count") or 0,
        token_gaps_s=total(page, prefix + b"inter_token_latency_seconds_sum") or 0.0,
    )


def read_loads(page: bytes) -> EngineReading:
    """Parse the load page, `/v1/loads` or `/get_load`, summed over data parallel ranks.

    Raises:
        EngineError: the page is not a load page.
    """
    try:
        parsed = json.loads(page)
        loads = parsed["loads"] if isinstance(parsed, dict) else parsed
        waiting = sum(load["num_waiting_reqs"] for load in loads)
        running = sum(_running(load) for load in loads)
        usage = [float(load["token_usage"]) for load in loads if "token_usage" in load]
        capacity = sum(positive_int(load.get("max_total_num_tokens")) or 0 for load in loads)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise EngineError(f"cannot parse SGLang's page of loads: {page[:200]!r}") from exc
    if not loads:
        raise EngineError("SGLang's page of loads has no engine")
    return EngineReading(
        waiting=waiting,
        running=running,
        kv_usage_ratio=sum(usage) / len(usage) if usage else None,
        kv_tokens=capacity or None,
    )


async def describe(pages: ControlPages) -> EngineServer:
    """Return the server's description of itself."""
    info = await _info(pages)
    path, reader = await _load_page(pages)
    ranks = positive_int(info.get("dp_size")) or 1
    capacity, version = positive_int(info.get("max_total_num_tokens")), info.get("version")
    return EngineServer(
        kind="SGLang",
        version=version if isinstance(version, str) else None,
        limits=ReportedLimits(
            max_model_len=listed_context(await pages.models()) or positive_int(info.get("context_length")),
            kv_tokens=capacity * ranks if capacity else None,
            max_num_seqs=_batch(info) or positive_int(info.get("max_running_requests")),
        ),
        metrics_path=path,
        reader=reader,
    )


async def _load_page(pages: ControlPages) -> tuple[str | None, Callable[[bytes], EngineReading]]:
    metrics = await pages.text("/metrics")
    for name in RUNNING:
        if name in metrics:
            return "/metrics", functools.partial(read_metrics, prefix=name[: len(b"sglang:")])
    for path in _LOAD_PAGES:
        if await pages.text(path):
            return path, read_loads
    return None, read_loads


async def _info(pages: ControlPages) -> Mapping[str, Any]:
    for path in _INFO_PAGES:
        if info := await pages.json(path):
            return info
    return {}


def _batch(info: Mapping[str, Any]) -> int:
    """Return the maximum batch size, summed over data parallel ranks; 0 if it is not reported."""
    states = info.get("internal_states")
    return sum(
        positive_int(state.get("effective_max_running_requests_per_dp")) or 0
        for state in (states if isinstance(states, list) else ())
        if isinstance(state, dict)
    )


def _running(load: Mapping[str, Any]) -> int:
    """Return the requests in one rank's batch. The older page includes waiting requests in `num_reqs`."""
    if "num_running_reqs" in load:
        return int(load["num_running_reqs"])
    return int(load["num_reqs"]) - int(load["num_waiting_reqs"])
