"""A pool that grows under load and shrinks after it, without losing a request."""

import asyncio
import time

import httpx
import pytest

from tests.e2e.served import Served, serve, wait_for

ARGS = {
    "models": [
        {
            "name": "demo",
            "pools": [
                {
                    "name": "short",
                    "engine": {"emulated": {"profile": "laptop"}},
                    "resources": {"num_cpus": 0.1},
                    "drain_timeout_s": 20.0,
                    "autoscaling": {
                        "max_replicas": 2,
                        "target_ongoing_requests": 8.0,
                        "upscale_delay_s": 1.0,
                        "downscale_delay_s": 3.0,
                        "advanced": {"look_back_period_s": 3.0},
                    },
                }
            ],
        }
    ],
    "gateways": {"num_cpus": 0.1, "drain_timeout_s": 5.0},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_pool_grows_under_load_and_shrinks_after_it() -> None:
    with serve(ARGS, {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}) as app:
        assert len(app.replicas("short")) == 1
        ending = asyncio.Event()
        async with httpx.AsyncClient(base_url=app.url, timeout=60) as http:
            clients = [asyncio.create_task(keep_asking(http, ending)) for _ in range(24)]
            await replicas(app, 2, within_s=40)
            # Both serve: the scheduler dispatches to both.
            await asyncio.sleep(1)
            ending.set()
            served_by = set().union(*await asyncio.gather(*clients))
            assert len(served_by) == 2
            # One answer continues while the pool shrinks; its replica drains first.
            last = asyncio.create_task(ask(http, 2_000))
            await replicas(app, 1, within_s=60)
            assert await last


async def keep_asking(http: httpx.AsyncClient, ending: asyncio.Event) -> set[str]:
    """Send one request after the other; returns the replicas that answered."""
    seen = set()
    while not ending.is_set():
        seen.add(await ask(http, 100))
    return seen


async def ask(http: httpx.AsyncClient, tokens: int) -> str:
    body = {"model": "demo", "prompt": f"At {time.time()}", "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return answer.headers["x-replica"]


async def replicas(app: Served, count: int, within_s: float) -> None:
    await asyncio.to_thread(
        wait_for, lambda: len(app.replicas("short")) == count, within_s, f"{count} replicas"
    )
