"""Text Generation Inference of Hugging Face, by its metrics and `/info`.

Its gauges appear with the first request, so a page without them is one of an idle server. It has no context
limit in its list of models, and `/info` states what one request may have.
"""

from serve_app.engines.adapters.control_pages import ControlPages
from serve_app.engines.adapters.samples import count, total
from serve_app.engines.adapters.server import EngineReading, EngineServer, StatedLimits, missing, whole

PREFIX = b"tgi_"
_GAPS = b"tgi_request_mean_time_per_token_duration"


def read(page: bytes) -> EngineReading:
    """Read the page of `/metrics`."""
    return EngineReading(
        waiting=count(page, b"tgi_queue_size") or 0,
        running=count(page, b"tgi_batch_current_size") or 0,
        # Counted once a request.
        token_gaps=count(page, _GAPS + b"_count") or 0,
        token_gaps_s=total(page, _GAPS + b"_sum") or 0.0,
    )


async def is_tgi(pages: ControlPages) -> bool:
    """Whether `/info` is that of TGI, which may have no metrics yet."""
    return {"model_pipeline_tag", "max_total_tokens", "docker_label"} <= (await pages.json("/info")).keys()


async def describe(pages: ControlPages) -> EngineServer:
    """What the server tells of itself."""
    info = await pages.json("/info")
    limits = StatedLimits(
        max_model_len=whole(info.get("max_total_tokens")),
        # Stated before 3.0. The most requests of `/info` is a limit on connections, not on the batch.
        kv_tokens=whole(info.get("max_batch_total_tokens")),
        max_num_seqs=whole(info.get("max_batch_size")),
    )
    answer = await pages.answer("/metrics")
    reading = read(answer.body) if answer.status == 200 else EngineReading()
    return EngineServer(
        kind="TGI",
        version=await pages.stated("/info", "version"),
        models=await pages.models(),
        limits=limits,
        lacks=missing(limits, reading),
        metrics_path="/metrics" if answer.status == 200 else None,
        reader=read,
    )
