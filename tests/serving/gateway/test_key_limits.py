"""Key limits over HTTP, across two gateways of one scheduler."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.request import PriorityClass
from serve_app.serving.api_keys import changed_keys
from serve_app.serving.gateway.answer.responses import duration
from tests.serving.channel.harness import wait_until
from tests.serving.test_api_keys import record

from .builders import Engine, chat, gateway, http_client
from .fleet import fleet_of

CHAT = "/v1/chat/completions"
LIMIT = 7


class TwoGateways:
    """Two gateways of one model, with one scheduler and one engine."""

    def __init__(self, secret: str, clients: list[httpx.AsyncClient], engine: Engine) -> None:
        self.secret, self.clients, self.engine = secret, clients, engine

    async def post(self, gateway: int, **changes: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.secret}"}
        return await self.clients[gateway].post("/v1/chat/completions", json=chat(**changes), headers=headers)


@pytest.fixture
def terms() -> dict[str, Any]:
    return {"requests_per_minute": LIMIT, "tokens_per_minute": 1_000_000}


@pytest.fixture
async def gateways(terms: dict[str, Any], tmp_path: Path) -> AsyncIterator[TwoGateways]:
    found, secret = record(**terms)
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [found])
    engine = Engine()
    async with fleet_of([engine], keys_file=str(path)) as fleet:
        other = gateway(await fleet.control_plane.gateway("g2"), keys_file=str(path))
        async with http_client(other) as http:
            yield TwoGateways(secret, [fleet.http, http], engine)


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


@pytest.mark.parametrize("terms", [{"models": ("another",), "highest_class": PriorityClass.BATCH}])
async def test_a_key_without_limits_has_no_such_headers_and_a_model_that_it_may_not_use_is_rejected(
    gateways: TwoGateways,
) -> None:
    answer = await gateways.post(0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    assert "it may use: another" in answer.json()["error"]["message"]
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    assert gateways.engine.bodies == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, b"0s"), (0.25, b"250ms"), (12.34, b"12.4s"), (60.0, b"1m0s"), (60.91, b"1m1s"), (59.99, b"1m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("terms", [{"tokens_per_minute": 1_000_000}])
async def test_a_stream_that_is_left_near_its_end_costs_what_it_has_received(
    terms: dict[str, Any], tmp_path: Path
) -> None:
    found, secret = record(**terms)
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [found])
    headers = {"authorization": f"Bearer {secret}"}
    async with fleet_of([Engine()], keys_file=str(path)) as fleet:

        async def remaining() -> int:
            answer = await fleet.http.post(CHAT, json=chat(max_tokens=1), headers=headers)
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        before = await remaining()
        body = chat(max_tokens=900, stream=True)
        async with fleet.http.stream("POST", CHAT, json=body, headers=headers) as stream:
            async for line in stream.aiter_lines():
                if "w800 " in line:
                    break
        await wait_until(lambda: not len(fleet.core), "the request has ended")
        assert before - await remaining() > 800
