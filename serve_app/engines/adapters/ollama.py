"""Ollama, which has no metrics: it tells its version, its models, and the context of those in memory.

A longer prompt is not refused but cut to the context, as Ollama does for every client.
"""

from serve_app.engines.adapters.control_pages import ControlPages
from serve_app.engines.adapters.server import EngineReading, EngineServer, StatedLimits, missing, whole

OWNER = "library"
_VERSION = "/api/version"


async def is_ollama(pages: ControlPages) -> bool:
    """Whether it has Ollama's own API; others may name the owner of a model as it does."""
    return await pages.stated(_VERSION, "version") is not None


async def describe(pages: ControlPages) -> EngineServer:
    """What the server tells of itself."""
    loaded = (await pages.json("/api/ps")).get("models")
    stated = [
        whole(model.get("context_length"))
        for model in (loaded if isinstance(loaded, list) else ())
        if isinstance(model, dict)
    ]
    limits = StatedLimits(max_model_len=min((each for each in stated if each is not None), default=None))
    return EngineServer(
        kind="Ollama",
        version=await pages.stated(_VERSION, "version"),
        models=await pages.models(),
        limits=limits,
        lacks=missing(limits, EngineReading()),
        health_path=_VERSION,
    )
