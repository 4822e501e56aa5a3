"""Batch requests that give way to interactive ones, through the whole application."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(300)

# More than the application serves at once, so that interactive requests need the places of some.
BATCH, TOKENS = 70, 600
INTERACTIVE = 40


def asked(number: int, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Write about the number {number}."}]
    return {"model": "demo", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **changes}


async def answer(http: httpx.AsyncClient, body: dict[str, Any], priority: str) -> dict[str, Any]:
    found = await http.post("/v1/chat/completions", json=body, headers={"x-priority": priority})
    assert found.status_code == 200, found.text
    document: dict[str, Any] = found.json()
    return {"choices": document["choices"], "usage": document["usage"]}


async def total(http: httpx.AsyncClient, series: str) -> float:
    """Return the sum of the metrics whose series begin like this, over all gateways."""
    name, _, labels = series.partition("{")
    wanted = labels.rstrip("}").split(",")
    lines = [line for line in (await http.get("/metrics")).text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in wanted))


async def test_batch_requests_give_way_and_continue(app: Served) -> None:
    limits = httpx.Limits(max_connections=BATCH + INTERACTIVE + 10)
    revoked = 'ewsjf_gateway_put_backs_total{model="demo",failure="revoked"}'
    headers = app.application.admin_headers()
    async with httpx.AsyncClient(base_url=app.url, timeout=240, limits=limits, headers=headers) as http:
        before = await total(http, revoked)
        batch = [asyncio.create_task(answer(http, asked(number), "batch")) for number in range(BATCH)]
        # Long enough for answers to begin, and shorter than any answer takes.
        await asyncio.sleep(1.5)
        assert not any(task.done() for task in batch)
        short = (asked(1_000 + number, max_tokens=20) for number in range(INTERACTIVE))
        await asyncio.gather(*(answer(http, body, "interactive") for body in short))
        assert not all(task.done() for task in batch)
        answers = await asyncio.gather(*batch)
        assert await total(http, revoked) > before
        assert [each["usage"]["completion_tokens"] for each in answers] == [TOKENS] * BATCH
        again = await asyncio.gather(*(answer(http, asked(number), "default") for number in range(BATCH)))
    assert again == answers
