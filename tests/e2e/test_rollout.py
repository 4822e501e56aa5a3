"""Redeployments with other settings, and replaced gateways, under requests that must not be affected."""

import asyncio
import json
import statistics
import time
from typing import Any

import httpx
import pytest

from experiments.common.audit import ENDS, asked
from experiments.common.redeployment import changed_args, redeploy, replica_processes
from tests.e2e.served import Served, serve, serve_config_of, wait_for

POOL = {
    "name": "only",
    "engine": {"emulated": {"profile": "laptop", "max_model_len": 4096}},
    "resources": {"num_cpus": 0.1},
    "drain_timeout_s": 60.0,
}
ARGS: dict[str, Any] = {
    "models": [{"name": "demo", "pools": [POOL], "scheduler": {"max_waiting": 300}}],
    "gateways": {"num_cpus": 0.1, "drain_timeout_s": 60.0},
}


async def keep_sending(http: httpx.AsyncClient, ending: asyncio.Event, prefix: str) -> list[tuple[str, str]]:
    """Send one request after another; return their ends."""
    ends: list[tuple[str, str]] = []
    while not ending.is_set():
        ends.append(await asked(http, f"{prefix}-{len(ends)}", 20 + len(ends) % 30))
    return ends


async def under_load(app: Served, args: dict[str, Any]) -> list[tuple[str, str]]:
    """Deploy these arguments under load; return the ends of the requests."""
    ending = asyncio.Event()
    async with httpx.AsyncClient(base_url=app.url, timeout=120) as http:
        clients = [asyncio.create_task(keep_sending(http, ending, f"c{number}")) for number in range(3)]
        # Open from before the change until some time after it.
        long = asyncio.create_task(asked(http, "long", 3_500))
        await asyncio.sleep(1)
        await asyncio.to_thread(redeploy, app.application, serve_config_of(app, args))
        ending.set()
        return [*(await long,), *(end for ends in await asyncio.gather(*clients) for end in ends)]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_other_settings_replace_only_what_cannot_apply_them_without_effect_on_clients() -> None:
    with serve(ARGS) as app:
        before = replica_processes(app.application)
        hot = changed_args(
            ARGS,
            {
                "models.0.scheduler": {"max_waiting": 7},
                "gateway.cors": {"allow_origins": ["https://a.example"]},
            },
        )
        assert {end for end, _ in await under_load(app, hot)} == {ENDS[0]}
        assert replica_processes(app.application) == before
        async with httpx.AsyncClient(base_url=app.url) as http:
            answer = await http.get("/health", headers={"origin": "https://a.example"})
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            (queue,) = (await http.get("/debug/queue", headers=app.application.admin_headers())).json()[
                "models"
            ]
            assert queue["max_waiting"] == 7
        engine = changed_args(hot, {"models.0.pools.0.engine.emulated.max_num_seqs": 16})
        assert {end for end, _ in await under_load(app, engine)} == {ENDS[0]}
        after = replica_processes(app.application)
        assert {name for name in before if set(before[name]) != set(after[name])} == {"only-demo"}


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_connection_whose_stream_outlives_its_gateway_takes_the_next_request_at_once() -> None:
    pool = changed_args(POOL, {"engine.emulated.max_model_len": 16_384})
    args = changed_args(ARGS, {"models.0.pools": [pool], "gateways.replicas": 2})
    with serve(args) as app:
        users = [
            asyncio.create_task(stream_then_reuse_connection(app, f"user-{number}", 7_500))
            for number in range(8)
        ]
        await asyncio.sleep(1)
        replaced = changed_args(args, {"gateway.advanced.upstream.connect_timeout_s": 4.0})
        await asyncio.to_thread(redeploy, app.application, serve_config_of(app, replaced))
        found = await asyncio.gather(*users)
    assert {end for ends, _ in found for end in ends} == {(ENDS[0], "")}
    assert statistics.median(took_s for _, took_s in found) < 0.9


async def stream_then_reuse_connection(
    app: Served, name: str, tokens: int
) -> tuple[list[tuple[str, str]], float]:
    """Stream a long, then a short answer on one connection; return the ends and the latter's duration."""
    one = httpx.Limits(max_connections=1, keepalive_expiry=None)
    async with httpx.AsyncClient(base_url=app.url, timeout=120, limits=one) as http:
        first = await asked(http, f"{name}-long", tokens)
        # The gateway has waited for this stream, and leaves within two seconds after it.
        await asyncio.sleep(4)
        began = time.monotonic()
        second = await asked(http, f"{name}-short", 20)
        return [first, second], time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_second_gateway_starts_under_load_and_completes_its_streams_when_it_stops() -> None:
    scaled = {"min_replicas": 1, "max_replicas": 2, "advanced": {"downscale_delay_s": 5.0}}
    args = changed_args(ARGS, {"gateways": {**ARGS["gateways"], "autoscaling": scaled}})
    with serve(args, {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}) as app:
        ending = asyncio.Event()
        async with httpx.AsyncClient(base_url=app.url, timeout=120) as http:
            # Requests that the gateway reads and rejects itself, as fast as it can.
            busy = [asyncio.create_task(keep_gateway_busy(http, ending)) for _ in range(24)]
            await gateways(app, 2)
            streams = [asyncio.create_task(asked(http, f"stream-{number}", 3_000)) for number in range(20)]
            await asyncio.sleep(2)
            ending.set()
            await asyncio.gather(*busy)
            assert {end for end, _ in await asyncio.gather(*streams)} == {ENDS[0]}
            await gateways(app, 1)
            assert (await http.get("/ready")).status_code == 200


async def keep_gateway_busy(http: httpx.AsyncClient, ending: asyncio.Event) -> None:
    turns = [{"role": "user", "content": "a"}] * 10_000
    body = json.dumps({"model": "absent", "messages": turns}).encode()
    while not ending.is_set():
        answer = await http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 404


async def gateways(app: Served, count: int) -> None:
    await asyncio.to_thread(wait_for, lambda: len(app.replicas("gateway")) == count, 90, f"{count} gateways")
