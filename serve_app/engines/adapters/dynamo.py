"""Adapter for NVIDIA Dynamo: reads the metrics of its frontend and the model list.

The frontend exposes the limits of one worker, and the number of workers. It exposes no queue: what it calls
queued are all requests without a first token, which the scheduler counts itself.
"""

from serve_app.engines.adapters.server import (
    ControlPages,
    EngineReading,
    EngineServer,
    ReportedLimits,
    count,
    first_of_each,
    listed_context,
    samples,
    total,
    values,
)
from serve_app.errors import EngineError

FRONTEND = b"dynamo_frontend_"
_MODEL = FRONTEND + b"model_"
_GAPS = FRONTEND + b"inter_token_latency_seconds"
_WORKERS, _ACTIVE_BLOCKS = _MODEL + b"workers", FRONTEND + b"worker_active_decode_blocks"


def read(page: bytes) -> EngineReading:
    """Parse the frontend's `/metrics`. Its limits are known once a worker has registered.

    Raises:
        EngineError: the page has no metric of a frontend.
    """
    if FRONTEND not in page:
        raise EngineError(f"the metrics have no name that begins with {FRONTEND.decode()}: is it Dynamo?")
    workers = count(page, _WORKERS) or len(first_of_each(samples(page, _ACTIVE_BLOCKS), b"worker_id")) or 1
    blocks, block_tokens, sequences = (
        _of_one_model(page, name) for name in (b"total_kv_blocks", b"kv_cache_block_size", b"max_num_seqs")
    )
    return EngineReading(
        kv_tokens=workers * blocks * block_tokens or None,
        max_num_seqs=workers * sequences or None,
        token_gaps=count(page, _GAPS + b"_count"),
        token_gaps_s=total(page, _GAPS + b"_sum"),
    )


async def describe(pages: ControlPages) -> EngineServer:
    """Return the server's description of itself."""
    page = await pages.text("/metrics")
    context = listed_context(await pages.models()) or _of_one_model(page, b"context_length") or None
    return EngineServer(
        kind="Dynamo",
        limits=ReportedLimits(max_model_len=context),
        metrics_path="/metrics",
        reader=read,
    )


def _of_one_model(page: bytes, name: bytes) -> int:
    """Return a limit of a worker, or 0 if it is missing or differs between models."""
    found = set(values(page, [_MODEL + name]))
    return round(found.pop()) if len(found) == 1 else 0
