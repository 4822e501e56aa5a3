"""Servers that answer the OpenAI API and are not known otherwise: their list of models is all they tell."""

from serve_app.engines.adapters.control_pages import ControlPages
from serve_app.engines.adapters.server import (
    EngineReading,
    EngineServer,
    StatedLimits,
    listed_context,
    missing,
)


async def describe(pages: ControlPages) -> EngineServer:
    """What the server tells of itself."""
    listings = await pages.models()
    # Some servers list a context limit as vLLM does.
    limits = StatedLimits(max_model_len=listed_context(listings))
    return EngineServer(
        kind="OpenAI-compatible",
        models=listings,
        limits=limits,
        lacks=missing(limits, EngineReading()),
        health_path="/v1/models",
    )
