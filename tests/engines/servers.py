"""Real HTTP servers for tests: ASGI apps, emulated engines and raw TCP servers."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import ASGIApp
from serve_app.errors import EngineError
from serve_app.serving.gateway import Gateway
from tests.http_server import listening


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def serving(app: ASGIApp | Gateway, port: int = 0) -> AsyncIterator[str]:
    """Serve an ASGI app or a gateway; yield its base URL."""
    async with listening(app, port) as found:
        yield f"http://127.0.0.1:{found}"


@contextlib.asynccontextmanager
async def tcp_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serve raw TCP with this handler; yield the base URL."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; a failing engine counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(EngineError):
            if await condition():
                return
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Served:
    """A served engine with clients."""

    engine: EmulatedEngine
    sdk: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def is_running(self, sequences: int) -> bool:
        return (await self.engine.load()).running == sequences

    async def is_waiting(self, sequences: int) -> bool:
        return (await self.engine.load()).waiting == sequences

    async def metrics(self) -> dict[str, float]:
        """Return samples by name, followed by a bar and the finish reason or bucket."""
        samples = {}
        for family in text_string_to_metric_families((await self.http.get("/metrics")).text):
            for sample in family.samples:
                marks = [sample.labels[key] for key in ("finished_reason", "le") if key in sample.labels]
                samples["|".join((sample.name, *marks))] = sample.value
        return samples


@contextlib.asynccontextmanager
async def served(settings: EmulatedEngineSettings) -> AsyncIterator[Served]:
    """Serve an emulated engine on a real server."""
    engine = EmulatedEngine(settings)
    await engine.start()
    async with serving(engine.app) as url:
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60) as http, sdk:
                yield Served(engine, sdk, http)
        finally:
            await engine.stop()
