"""Adapters for servers that expose few metrics: TGI, Ollama and unknown OpenAI-compatible servers."""

from serve_app.engines.adapters.server import (
    ControlPages,
    EngineReading,
    EngineServer,
    ReportedLimits,
    count,
    positive_int,
    total,
)

TGI_PREFIX = b"tgi_"
OLLAMA_OWNER = "library"
_TGI_GAPS = b"tgi_request_mean_time_per_token_duration"
_OLLAMA_VERSION = "/api/version"


def read_tgi(page: bytes) -> EngineReading:
    """Parse TGI's `/metrics`. Its gauges appear with the first request, so a missing gauge means idle."""
    return EngineReading(
        waiting=count(page, b"tgi_queue_size") or 0,
        running=count(page, b"tgi_batch_current_size") or 0,
        # TGI observes this histogram once per request.
        token_gaps=count(page, _TGI_GAPS + b"_count") or 0,
        token_gaps_s=total(page, _TGI_GAPS + b"_sum") or 0.0,
    )


async def is_tgi(pages: ControlPages) -> bool:
    """Return whether `/info` has TGI's fields. TGI may have no metrics yet."""
    return {"model_pipeline_tag", "max_total_tokens", "docker_label"} <= (await pages.json("/info")).keys()


async def describe_tgi(pages: ControlPages) -> EngineServer:
    """Describe a TGI server. The context limit is that of `/info`, since its model list has none."""
    info = await pages.json("/info")
    limits = ReportedLimits(
        max_model_len=positive_int(info.get("max_total_tokens")),
        # Reported before 3.0 only. `max_concurrent_requests` of `/info` limits connections, not the batch.
        kv_tokens=positive_int(info.get("max_batch_total_tokens")),
        max_num_seqs=positive_int(info.get("max_batch_size")),
    )
    return EngineServer(
        kind="TGI",
        version=await pages.string_field("/info", "version"),
        limits=limits,
        metrics_path="/metrics" if (await pages.answer("/metrics")).status == 200 else None,
        reader=read_tgi,
    )


async def is_ollama(pages: ControlPages) -> bool:
    """Return whether the server has Ollama's API. Other servers may report the same model owner."""
    return await pages.string_field(_OLLAMA_VERSION, "version") is not None


async def describe_ollama(pages: ControlPages) -> EngineServer:
    """Describe an Ollama server by its version, models and loaded contexts. Ollama has no metrics.

    Ollama truncates prompts that exceed the context instead of rejecting them.
    """
    loaded = (await pages.json("/api/ps")).get("models")
    contexts = [
        positive_int(model.get("context_length"))
        for model in (loaded if isinstance(loaded, list) else ())
        if isinstance(model, dict)
    ]
    return EngineServer(
        kind="Ollama",
        version=await pages.string_field(_OLLAMA_VERSION, "version"),
        limits=ReportedLimits(
            max_model_len=min((each for each in contexts if each is not None), default=None)
        ),
        health_path=_OLLAMA_VERSION,
    )


async def describe_unknown(pages: ControlPages) -> EngineServer:
    """Describe a server by its model list only."""
    # A list with several limits is that of a proxy, whose models are not on one engine.
    contexts = {listing.max_model_len for listing in await pages.models()}
    limits = ReportedLimits(max_model_len=contexts.pop() if len(contexts) == 1 else None)
    return EngineServer(kind="OpenAI-compatible", limits=limits, health_path="/v1/models")
