"""Adapter for llama.cpp: reads `/metrics` if the server runs with `--metrics`, otherwise `/slots`.

Each slot holds one request, so the number of slots is the batch size. The server does not expose whether
slots share one cache, so the size of the KV cache remains unknown and the number of slots is the limit.
"""

from collections.abc import Callable

from serve_app.engines.adapters.server import (
    ControlPages,
    EngineReading,
    EngineServer,
    ReportedLimits,
    count,
    listed_context,
    mean,
    positive_int,
    total,
)
from serve_app.errors import EngineError

RUNNING = b"llamacpp:requests_processing"
OWNER = "llamacpp"
_SLOTS = "/slots"
_BUSY, _FREE = b'"is_processing":true', b'"is_processing":false'


def read_metrics(page: bytes) -> EngineReading:
    """Parse `/metrics`.

    Raises:
        EngineError: the page has no llama.cpp gauges.
    """
    running, waiting = count(page, RUNNING), count(page, b"llamacpp:requests_deferred")
    if running is None or waiting is None:
        raise EngineError(f"the metrics have no {RUNNING.decode()}: is it a llama.cpp server with --metrics?")
    return EngineReading(
        waiting=waiting,
        running=running,
        # Removed from llama.cpp in 2025.
        kv_usage_ratio=mean(page, b"llamacpp:kv_cache_usage_ratio"),
        token_gaps=count(page, b"llamacpp:tokens_predicted_total") or 0,
        token_gaps_s=total(page, b"llamacpp:tokens_predicted_seconds_total") or 0.0,
    )


def read_slots(page: bytes) -> EngineReading:
    """Parse `/slots`, which reports running but not waiting requests.

    Raises:
        EngineError: the page is not a list of slots.
    """
    running = page.count(_BUSY)
    slots = running + page.count(_FREE)
    if not slots:
        raise EngineError(f"cannot parse the page of slots: {page[:200]!r}")
    return EngineReading(running=running, max_num_seqs=slots)


async def describe(pages: ControlPages) -> EngineServer:
    """Return the server's description of itself."""
    props = await pages.json("/props")
    path, reader = await _load_page(pages)
    return EngineServer(
        kind="llama.cpp",
        version=await pages.string_field("/props", "build_info"),
        limits=ReportedLimits(
            max_model_len=await _context(pages), max_num_seqs=positive_int(props.get("total_slots"))
        ),
        metrics_path=path,
        reader=reader,
    )


async def _load_page(pages: ControlPages) -> tuple[str | None, Callable[[bytes], EngineReading]]:
    if RUNNING in await pages.text("/metrics"):
        return "/metrics", read_metrics
    if _BUSY in (slots := await pages.text(_SLOTS)) or _FREE in slots:
        return _SLOTS, read_slots
    return None, read_slots


async def _context(pages: ControlPages) -> int | None:
    """Return the context limit of one slot in tokens."""
    settings = (await pages.json("/props")).get("default_generation_settings")
    context = positive_int(settings.get("n_ctx")) if isinstance(settings, dict) else None
    return context or listed_context(await pages.models())
