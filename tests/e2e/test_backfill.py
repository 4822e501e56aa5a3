"""Batch requests that give way to interactive ones, through the whole application."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served, wait_for

pytestmark = pytest.mark.timeout(300)

# More than the application serves at once, so that interactive requests need the places of some.
BATCH, TOKENS = 70, 600
INTERACTIVE = 40
# Requests on the two replicas of the short pool that batch work reaches only where no others run.
ALONE = 24


def request_body(number: int, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Write about the number {number}."}]
    return {"model": "demo", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **changes}


async def answer(http: httpx.AsyncClient, body: dict[str, Any], priority: str) -> dict[str, Any]:
    found = await http.post("/v1/chat/completions", json=body, headers={"x-priority": priority})
    assert found.status_code == 200, found.text
    document: dict[str, Any] = found.json()
    for choice in document["choices"]:
        # Streams, from which answers of batch work are assembled, have none.
        choice["message"].pop("annotations", None)
    return {"choices": document["choices"], "usage": document["usage"]}


def in_flight(app: Served) -> float:
    return app.metric("ewsjf_requests_in_flight", model="demo", pool="short")


def revoked(app: Served) -> float:
    return app.metric("ewsjf_gateway_put_backs_total", model="demo", failure="revoked")


async def test_batch_requests_give_way_and_continue(app: Served) -> None:
    limits = httpx.Limits(max_connections=BATCH + INTERACTIVE + 10)
    before = revoked(app)
    async with httpx.AsyncClient(base_url=app.url, timeout=240, limits=limits) as http:
        batch = [asyncio.create_task(answer(http, request_body(number), "batch")) for number in range(BATCH)]
        # Earlier requests of other classes limit batch work for seconds.
        await asyncio.to_thread(wait_for, lambda: in_flight(app) >= ALONE, 60, "batch work on most places")
        short = (request_body(1_000 + number, max_tokens=20) for number in range(INTERACTIVE))
        await asyncio.gather(*(answer(http, body, "interactive") for body in short))
        assert not all(task.done() for task in batch)
        answers = await asyncio.gather(*batch)
        assert revoked(app) > before
        assert [each["usage"]["completion_tokens"] for each in answers] == [TOKENS] * BATCH
        again = await asyncio.gather(
            *(answer(http, request_body(number), "default") for number in range(BATCH))
        )
    assert again == answers
