"""Pools that scale independently, down to zero, without losing a request."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served, serve, wait_for

# Emulated engines start in seconds.
SHORT = {"min_replicas": 1, "max_replicas": 2, "advanced": {"downscale_delay_s": 4.0}}
LONG = {"min_replicas": 0, "max_replicas": 2, "advanced": {"downscale_delay_s": 8.0}}


def pool(name: str, max_model_len: int, autoscaling: dict[str, object]) -> dict[str, object]:
    return {
        "name": name,
        "engine": {"emulated": {"profile": "laptop", "max_model_len": max_model_len}},
        "resources": {"num_cpus": 0.1},
        "drain_timeout_s": 20.0,
        "autoscaling": autoscaling,
    }


ARGS = {
    "models": [
        {
            "name": "demo",
            "pools": [pool("short", 4096, SHORT), pool("long", 8192, LONG)],
            "scheduler": {"routing": {"b_short_tokens": 4096}},
        }
    ],
    "gateways": {"num_cpus": 0.1, "drain_timeout_s": 5.0},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_pools_scale_separately_and_an_empty_one_starts_for_its_first_request() -> None:
    with serve(ARGS, {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}) as app:
        assert (len(app.replicas("short")), len(app.replicas("long"))) == (1, 0)
        async with httpx.AsyncClient(base_url=app.url, timeout=90) as http:
            assert (await http.get("/ready")).status_code == 200
            await the_short_pool_grows_and_drains(http, app)
            # The long pool has had no request, so it has had no replica.
            await send_request(http, 100, prompt="word " * 5_000)
            assert len(app.replicas("long")) == 1
            scaling = await scaling_once_ready(http, app.application.admin_headers())
            assert 0 < scaling["start_s"] < 60
            page = (await http.get("/metrics")).text
            assert 'ewsjf_desired_replicas{model="demo",pool="long"} 1.0' in page
            await replicas(app, "long", 0, within_s=60)


async def the_short_pool_grows_and_drains(http: httpx.AsyncClient, app: Served) -> None:
    ending = asyncio.Event()
    clients = [asyncio.create_task(keep_sending(http, ending)) for _ in range(24)]
    await replicas(app, "short", 2, within_s=60)
    # Both replicas serve.
    await asyncio.sleep(1)
    ending.set()
    served_by = set().union(*await asyncio.gather(*clients))
    assert len(served_by) == 2
    assert app.replicas("long") == []
    # One answer continues while the pool shrinks; its replica drains first.
    last = asyncio.create_task(send_request(http, 2_000))
    await replicas(app, "short", 1, within_s=60)
    assert await last


async def scaling_once_ready(http: httpx.AsyncClient, admin: dict[str, str]) -> dict[str, Any]:
    """Return the long pool's scaling document once it is ready; it is updated every second."""
    async with asyncio.timeout(6):
        while True:
            (model,) = (await http.get("/debug/scaling", headers=admin)).json()["models"]
            scaling: dict[str, Any] = model["pools"]["long"]
            if scaling["ready"] == 1:
                return scaling
            await asyncio.sleep(0.1)


async def keep_sending(http: httpx.AsyncClient, ending: asyncio.Event) -> set[str]:
    """Send one request after another; return the replicas that answered."""
    seen = set()
    while not ending.is_set():
        seen.add(await send_request(http, 100))
    return seen


async def send_request(http: httpx.AsyncClient, tokens: int, prompt: str = "") -> str:
    text = prompt or f"At {time.time()}"
    body = {"model": "demo", "prompt": text, "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return answer.headers["x-replica"]


async def replicas(app: Served, name: str, count: int, within_s: float) -> None:
    await asyncio.to_thread(
        wait_for, lambda: len(app.replicas(name)) == count, within_s, f"{count} {name} replicas"
    )
