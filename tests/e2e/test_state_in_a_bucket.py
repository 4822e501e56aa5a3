"""Application with its state in a bucket: restarted, and with a slow bucket."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.served import Served, serve
from tests.relay import Relay
from tests.serving.state.bucket import Bucket, served_bucket

POOL = {
    "name": "only",
    "engine": {"emulated": {"profile": "laptop", "max_model_len": 4096}},
    "resources": {"num_cpus": 0.1},
    "drain_timeout_s": 10.0,
}
KEY = "secret-of-app"
# A call takes at least twice this long: once for the request, once for the answer.
SLOW_S = 2.0


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with served_bucket(tmp_path) as served:
        yield served


@contextlib.asynccontextmanager
async def relayed(bucket: Bucket) -> AsyncIterator[tuple[Relay, dict[str, str]]]:
    """Yield a relay to the bucket that can be slowed down, and the environment that uses it."""
    at = urlsplit(bucket.environment["AWS_ENDPOINT_URL"])
    relay = Relay(lambda: (at.hostname or "", at.port or 0))
    await relay.start()
    try:
        yield relay, {**bucket.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
    finally:
        await relay.stop()


@contextlib.asynccontextmanager
async def application(bucket: Bucket, environment: dict[str, str]) -> AsyncIterator[Served]:
    """Start and stop in a thread, because the relay is on this event loop."""
    args: dict[str, Any] = {
        "models": [{"name": "demo", "pools": [POOL]}],
        "gateway": {"keys": [{"tenant": "app", "key": KEY, "admin": True}]},
        "gateways": {"num_cpus": 0.1},
        "state_uri": f"{bucket.uri}/app",
        "advanced": {"state_interval_s": 1.0},
    }
    manager = serve(args, environment)
    served = await asyncio.to_thread(manager.__enter__)
    try:
        yield served
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def answered(http: httpx.AsyncClient) -> tuple[int, float]:
    """Send one request; return its token budget and its duration."""
    began = time.monotonic()
    answer = await http.post(
        "/v1/chat/completions",
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": "What is learned?"}],
            "max_tokens": 20,
        },
    )
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-estimated-tokens"]), time.monotonic() - began


async def requests_used(http: httpx.AsyncClient) -> int:
    """Return the requests counted in the usage ledger."""
    usage = (await http.get("/debug/usage")).json()
    return sum(row["requests"] for model in usage["models"] for row in model["rows"])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_restart_continues_with_the_state_in_its_bucket_however_slow(bucket: Bucket) -> None:
    async with relayed(bucket) as (relay, environment):
        async with application(bucket, environment) as app, client_of(app) as http:
            first, _ = await answered(http)
            await asyncio.gather(*(answered(http) for _ in range(40)))
            learned, _ = await answered(http)
            # The prompt has 15 tokens, which is unknown before the engine has counted some.
            assert learned < first - 20
            used = await requests_used(http)
            assert used >= 42
        async with application(bucket, environment) as app, client_of(app) as http:
            again, _ = await answered(http)
            assert abs(again - learned) <= 5
            assert await requests_used(http) >= used + 1
            await a_slow_bucket_is_not_noticed(http, relay)


def client_of(app: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=app.url, timeout=60, headers={"authorization": f"Bearer {KEY}"})


async def a_slow_bucket_is_not_noticed(http: httpx.AsyncClient, relay: Relay) -> None:
    usual = [(await answered(http))[1] for _ in range(10)]
    relay.delay_s = SLOW_S
    saved_at = await metric(http, "ewsjf_state_saved_timestamp_seconds")
    took, waited = [], []
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        took.append((await answered(http))[1])
        began = time.monotonic()
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        waited.append(time.monotonic() - began)
    assert statistics.median(took) < 2.0 * statistics.median(usual)
    assert max(waited) < SLOW_S
    assert max(took) < SLOW_S + max(usual)
    # The bucket is slow, but nothing is lost.
    assert await metric(http, "ewsjf_state_saved_timestamp_seconds") > saved_at
    assert await metric(http, "ewsjf_state_failures_total") == 0.0


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """Return the sum of a metric's samples."""
    page = text_string_to_metric_families((await http.get("/metrics")).text)
    return sum(sample.value for family in page for sample in family.samples if sample.name == name)
