"""Receipts and captures of an overloaded application, over HTTP."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.lab.workloads import load_trace
from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(300)

REQUESTS = 250
MAX_IN_FLIGHT = 150
CLASSES = ("interactive", "default", "batch")


async def send_request(
    http: httpx.AsyncClient, number: int, rng: random.Random, concurrency: asyncio.Semaphore
) -> httpx.Response:
    """Send a request of random length, class and tenant; every third is streamed."""
    content = "word " * rng.choice((5, 20, 100, 600))
    async with concurrency:
        return await http.post(
            "/v1/chat/completions",
            headers={
                "x-tenant": f"tenant-{rng.randrange(4)}",
                "x-priority": rng.choice(CLASSES),
                "x-request-id": f"client-{number}",
                "x-ewsjf-receipt": "1",
            },
            json={
                "model": "demo",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": rng.choice((16, 48, 160)),
                "stream": number % 3 == 0,
            },
        )


async def test_the_causes_of_hundreds_of_waits_add_up(app: Served, tmp_path: Path) -> None:
    rng, concurrency = random.Random(7), asyncio.Semaphore(MAX_IN_FLIGHT)
    limits = httpx.Limits(max_connections=MAX_IN_FLIGHT + 10)
    admin = app.application.admin_headers()
    async with httpx.AsyncClient(base_url=app.url, timeout=200, limits=limits) as http:
        answers = await asyncio.gather(
            *(send_request(http, number, rng, concurrency) for number in range(REQUESTS))
        )
        assert {answer.status_code for answer in answers} <= {200, 429}
        receipts = [
            (await http.get(f"/debug/requests/client-{number}", headers=admin)).json()
            for number in range(REQUESTS)
        ]
        capture = await http.get("/debug/capture", headers=admin)
        costs = (await http.get("/debug/costs", headers=admin)).json()["models"][0]
        table = await http.get("/debug/costs.csv", headers=admin)

    served = [pair for pair in zip(answers, receipts, strict=True) if pair[0].status_code == 200]
    assert len(served) > REQUESTS / 2
    with_causes = [receipt for _, receipt in served if receipt["queue"]["causes"]]
    # The first burst alone exceeds the replicas' capacity; later waits depend on the client's speed.
    assert len(with_causes) > REQUESTS / 10
    for answer, receipt in served:
        assert_consistent(answer, receipt)
    causes = {each["cause"] for receipt in with_causes for each in receipt["queue"]["causes"]}
    assert causes >= {"engines_busy", "higher_class", "other_tenants", "own_requests"}
    assert "before_scheduler" not in causes

    assert {row["tenant"] for row in costs["rows"]} >= {f"tenant-{number}" for number in range(4)}
    # Three replicas; every engine second with requests is charged to a tenant.
    assert 1 < sum(row["engine_seconds"] for row in costs["rows"]) <= 3 * costs["counted_s"]
    assert sum(row["imposed_delay_seconds"] for row in costs["rows"]) > 0
    assert table.text.count("\n") >= len(costs["rows"])

    captured = tmp_path / "captured.jsonl"
    captured.write_bytes(capture.content)
    trace = load_trace(captured)
    assert len(trace.requests) >= len(served)
    assert {request.priority.value for request in trace.requests} >= set(CLASSES)
    assert "tenant-" not in capture.text
    assert "word" not in capture.text


def assert_consistent(answer: httpx.Response, receipt: dict[str, Any]) -> None:
    """Assert that a receipt is consistent and agrees with its answer."""
    queue = receipt["queue"]
    wait_ms = queue["ms"]
    assert receipt["outcome"] == "completed"
    assert receipt["class"] in CLASSES
    assert abs(wait_ms - float(answer.headers["x-queue-wait-ms"])) <= 0.1
    summary = json.loads(answer.headers["x-ewsjf-receipt"])
    assert abs(summary["wait_ms"] - wait_ms) < 0.01
    if queue["causes"]:
        total_ms = sum(each["ms"] for each in queue["causes"])
        assert abs(total_ms - wait_ms) < 0.01
        assert abs(sum(summary["causes_ms"].values()) - wait_ms) < 0.01
        assert all(each["ms"] > 0 and each["meaning"] for each in queue["causes"])
    else:
        assert wait_ms <= 1
    stages = {each["stage"]: each["ms"] for each in receipt["stages"]}
    assert stages["queue"] == wait_ms
    # Gateway and scheduler share the machine's clock; figures are rounded.
    assert min(stages.values()) > -0.01, receipt
    assert receipt["attempts"][-1]["pool"] == answer.headers["x-pool"]
    assert receipt["tokens"]["output"] > 0


async def test_an_unknown_request_is_not_found(app: Served) -> None:
    async with httpx.AsyncClient(base_url=app.url, timeout=30) as http:
        admin = app.application.admin_headers()
        answer = await http.get("/debug/requests/unknown", headers=admin)

    assert answer.status_code == 404
    assert "ten minutes" in answer.json()["error"]["message"]
