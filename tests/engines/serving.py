"""Serve an engine the way a replica does: uvicorn on a port of its own, in this event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import openai
import uvicorn

from serve_app.engines.emulated import EmulatedEngine, EmulatedEngineSettings


@dataclass(frozen=True)
class Served:
    """A served engine, and clients for it."""

    engine: EmulatedEngine
    url: str
    sdk: openai.AsyncOpenAI
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def served(settings: EmulatedEngineSettings) -> AsyncIterator[Served]:
    """An emulated engine behind a real server."""
    engine = EmulatedEngine(settings)
    await engine.start()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(engine.app, log_level="warning", lifespan="on"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        assert not task.done(), "the server has not started"
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http, sdk:
            yield Served(engine, url, sdk, http)
    finally:
        server.should_exit = True
        await task
        await engine.stop()
        listener.close()
