"""Clients that send slowly, over HTTP."""

import asyncio
import json

import pytest

from serve_app.serving import http_server
from tests.serving.channel.harness import wait_until

from .builders import chat
from .conftest import running_gateway

CHAT = "/v1/chat/completions"
HEAD = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" % CHAT.encode()


@pytest.mark.parametrize("pieces", [0, 5])
async def test_a_body_that_does_not_arrive_is_rejected_and_counts_as_in_flight(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REST_OF_BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_server, "CHECK_INTERVAL_S", 0.1)
    async with running_gateway(body_grace_s=0.5, min_body_bytes_per_s=100_000.0) as harness:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(HEAD)
        await wait_until(lambda: harness.gateway.in_flight == 1)
        # A few bytes now and then do not extend the timeout.
        for _ in range(pieces):
            await asyncio.sleep(0.05)
            writer.write(b" ")
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            assert b"body_too_slow" in await reader.read()
        writer.close()
        assert harness.gateway.in_flight == 0


async def test_a_long_body_that_arrives_at_a_fair_rate_is_accepted() -> None:
    async with running_gateway(body_grace_s=0.3, min_body_bytes_per_s=1_000.0) as harness:
        body = json.dumps(chat()).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(HEAD + b" " * (200_000 - len(body) - 10))
        await asyncio.sleep(0.8)
        writer.write(body + b" " * 10)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
