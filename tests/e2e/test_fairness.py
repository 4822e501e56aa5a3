"""Two tenants with one request each beside a flooding tenant, through the whole application."""

import asyncio

import httpx
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(300)

FLOOD = 200


async def queue_wait_ms(http: httpx.AsyncClient, tenant: str) -> float:
    """Return the queue time of a short request of `tenant`, which must be answered."""
    answer = await http.post(
        "/v1/chat/completions",
        headers={"x-tenant": tenant},
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": f"Hello from {tenant}"}],
            "max_tokens": 24,
        },
    )
    assert answer.status_code == 200, answer.text
    return float(answer.headers["x-queue-wait-ms"])


async def test_a_tenant_with_one_request_is_served_before_a_flood(app: Served) -> None:
    limits = httpx.Limits(max_connections=FLOOD + 10)
    async with httpx.AsyncClient(base_url=app.url, timeout=120, limits=limits) as http:
        flood = [asyncio.create_task(queue_wait_ms(http, "flood")) for _ in range(FLOOD)]
        waiting = await sub_queues_once_many_wait(http, flood, app.application.admin_headers())
        late = await asyncio.gather(queue_wait_ms(http, "late-1"), queue_wait_ms(http, "late-2"))
        waits = sorted(await asyncio.gather(*flood))
    assert all(sub_queue["reason"] for sub_queue in waiting)
    # Only requests that were already dispatched are served before them, and most of the flood after.
    assert max(late) < waits[-FLOOD // 4]


async def sub_queues_once_many_wait(
    http: httpx.AsyncClient, flood: list[asyncio.Task[float]], admin: dict[str, str]
) -> list[dict[str, object]]:
    """Return the flood's sub-queues from the admin API once a quarter of it is queued."""
    while not all(task.done() for task in flood):
        (model,) = (await http.get("/debug/queue", headers=admin)).json()["models"]
        sub_queues = [sub_queue for sub_queue in model["sub_queues"] if sub_queue["tenant"] == "flood"]
        if sum(sub_queue["waiting"] for sub_queue in sub_queues) > FLOOD / 4:
            return sub_queues
    raise AssertionError("the flood never queued up: the engines of this application are too fast for it")
