"""Key limits over HTTP, across two gateways of one scheduler."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.serving.api_keys import changed_keys
from serve_app.serving.gateway.answer.responses import duration
from tests.serving.channel.harness import wait_until
from tests.serving.test_api_keys import record

from .builders import Engine, chat, gateway, http_client
from .fleet import Fleet, fleet_of

CHAT = "/v1/chat/completions"
LIMIT = 7


@dataclass
class TwoGateways:
    """Clients with one key of two gateways of one model, with one scheduler and one engine."""

    clients: list[httpx.AsyncClient]
    engine: Engine
    fleet: Fleet

    async def post(self, gateway: int, **changes: Any) -> httpx.Response:
        return await self.clients[gateway].post(CHAT, json=chat(**changes))


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[TwoGateways]:
    found, secret = record(requests_per_minute=LIMIT, tokens_per_minute=1_000_000)
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [found])
    headers = {"authorization": f"Bearer {secret}"}
    engine = Engine()
    async with fleet_of([engine], keys_file=str(path)) as fleet:
        fleet.http.headers.update(headers)
        other = gateway(await fleet.control_plane.gateway("g2"), keys_file=str(path))
        async with http_client(other, headers=headers) as http:
            yield TwoGateways([fleet.http, http], engine, fleet)


async def test_two_gateways_together_admit_exactly_the_limit(gateways: TwoGateways) -> None:
    answers = await asyncio.gather(*(gateways.post(number % 2) for number in range(40)))
    assert sorted(answer.status_code for answer in answers) == [200] * LIMIT + [429] * (40 - LIMIT)
    assert len(gateways.engine.bodies) == LIMIT
    served = [answer for answer in answers if answer.status_code == 200]
    remaining = {int(answer.headers["x-ratelimit-remaining-requests"]) for answer in served}
    # The count at each grant; queued requests are granted after all have been counted.
    assert remaining <= set(range(LIMIT))
    assert min(remaining) == 0
    rejected = next(answer for answer in answers if answer.status_code == 429)
    assert rejected.json()["error"]["code"] == "rate_limit_exceeded"
    assert f"limit of {LIMIT} requests per minute" in rejected.json()["error"]["message"]
    assert 1 <= int(rejected.headers["retry-after"]) <= 61
    assert rejected.headers["x-ratelimit-limit-requests"] == str(LIMIT)
    assert rejected.headers["x-ratelimit-remaining-requests"] == "0"
    assert rejected.headers["x-ratelimit-reset-requests"].endswith("s")


async def test_streams_carry_the_same_headers(gateways: TwoGateways) -> None:
    answer = await gateways.post(0, stream=True)
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000000"
    assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 1_000_000
    assert answer.headers["x-ratelimit-remaining-requests"] == str(LIMIT - 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, b"0s"), (0.25, b"250ms"), (12.34, b"12.4s"), (60.0, b"1m0s"), (60.91, b"1m1s"), (59.99, b"1m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


async def test_a_stream_that_is_left_near_its_end_costs_what_it_has_received(gateways: TwoGateways) -> None:
    async def remaining() -> int:
        answer = await gateways.post(0, max_tokens=1)
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    before = await remaining()
    body = chat(max_tokens=900, stream=True)
    async with gateways.fleet.http.stream("POST", CHAT, json=body) as stream:
        async for line in stream.aiter_lines():
            if "w800 " in line:
                break
    await wait_until(lambda: not len(gateways.fleet.core), "the request has ended")
    assert before - await remaining() > 800
