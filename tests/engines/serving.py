"""Serve an engine the way a replica does: uvicorn on a port of its own, in this event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
import openai
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings


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


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        # The engine offers no event to wait for: outsiders can only look.
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def metrics_of(it: Served) -> dict[str, float]:
    text = (await it.http.get("/metrics")).text
    return {
        sample.name
        + "".join(
            f"|{sample.labels[key]}" for key in ("finished_reason", "le") if key in sample.labels
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def is_running(it: Served, running: int) -> bool:
    return (await it.engine.load()).running == running


async def is_waiting(it: Served, waiting: int) -> bool:
    return (await it.engine.load()).waiting == waiting
