"""Draining gateway: new requests are rejected, open ones complete, the rest fail at the deadline."""

import asyncio

import httpx

from tests.serving.channel.harness import wait_until

from .builders import chat
from .conftest import GatewayHarness

CHAT = "/v1/chat/completions"


async def opened(harness: GatewayHarness, tokens: int, *, stream: bool) -> "asyncio.Task[httpx.Response]":
    """Start a request and wait until the engine runs it."""
    before = harness.engine.running
    task = asyncio.create_task(harness.http.post(CHAT, json=chat(max_tokens=tokens, stream=stream)))
    await wait_until(lambda: harness.engine.running == before + 1)
    return task


async def test_open_answers_end_and_new_requests_are_rejected(harness: GatewayHarness) -> None:
    harness.engine.token_delay_s = 0.02
    stream = await opened(harness, 20, stream=True)
    whole = await opened(harness, 20, stream=False)
    draining = asyncio.create_task(harness.gateway.drain(30.0, 12.0))
    await asyncio.sleep(0)
    assert harness.gateway.open_requests == 2
    rejected = await harness.http.post(CHAT, json=chat())
    assert rejected.status_code == 503
    assert rejected.headers["retry-after"] == "12"
    assert rejected.json()["error"]["code"] == "shutting_down"
    ready = await harness.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "stopping")
    assert (await harness.http.get("/health")).status_code == 200
    assert await draining == 0
    assert (await stream).text.endswith("data: [DONE]\n\n")
    assert (await whole).json()["usage"]["completion_tokens"] == 20
    assert harness.gateway.open_requests == 0


async def test_a_gateway_with_nothing_open_is_drained_at_once(harness: GatewayHarness) -> None:
    async with asyncio.timeout(5):
        assert await harness.gateway.drain(600.0, 5.0) == 0
