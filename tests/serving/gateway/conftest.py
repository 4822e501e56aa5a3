"""Fixtures for gateway tests: an engine, a scheduler, a gateway over both, and its base URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from serve_app.engines.engine import ASGIApp
from serve_app.serving.gateway import Gateway, UpstreamSettings

from .builders import Engine, FakeDispatcher, gateway, serving


@dataclass
class GatewayHarness:
    """A gateway in front of one engine, with real sockets."""

    engine: Engine
    dispatcher: FakeDispatcher
    gateway: Gateway
    port: int
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI


@pytest.fixture
async def harness() -> AsyncIterator[GatewayHarness]:
    async with running_gateway() as made:
        yield made


@asynccontextmanager
async def running_gateway(
    dispatcher: FakeDispatcher | None = None,
    *,
    engine: ASGIApp | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayHarness]:
    """Run a gateway with these settings.

    Args:
        engine: replaces the scripted engine; `GatewayHarness.engine` is then idle.
    """
    scripted, dispatcher = Engine(), dispatcher or FakeDispatcher([])
    async with serving(engine or scripted) as engine_port:
        dispatcher.ports = [engine_port]
        app = gateway(dispatcher, **settings)
        upstream = settings.get("upstream", UpstreamSettings())
        async with serving(app, stalled_s=upstream.stalled_client_timeout_s) as port:
            url = f"http://127.0.0.1:{port}"
            async with (
                httpx.AsyncClient(base_url=url, timeout=30) as http,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as sdk,
            ):
                yield GatewayHarness(scripted, dispatcher, app, port, http, sdk)
        app.close()
