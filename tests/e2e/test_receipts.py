"""Receipts, costs and captures of an overloaded application, over HTTP."""

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


async def send_request(http: httpx.AsyncClient, number: int, rng: random.Random) -> httpx.Response:
    """Send a request of random length, class and tenant; every third is streamed."""
    headers = {"x-tenant": f"tenant-{rng.randrange(4)}", "x-priority": rng.choice(CLASSES)}
    content = "word " * rng.choice((5, 20, 100, 600))
    return await http.post(
        "/v1/chat/completions",
        headers={**headers, "x-request-id": f"client-{number}", "x-ewsjf-receipt": "1"},
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.choice((16, 48, 160)),
            "stream": number % 3 == 0,
        },
    )


async def test_the_causes_of_hundreds_of_waits_add_up(app: Served, tmp_path: Path) -> None:
    rng, limits = random.Random(7), httpx.Limits(max_connections=MAX_IN_FLIGHT)
    admin = app.application.admin_headers()
    async with httpx.AsyncClient(base_url=app.url, timeout=200, limits=limits) as http:
        answers = await asyncio.gather(*(send_request(http, number, rng) for number in range(REQUESTS)))
        assert {answer.status_code for answer in answers} <= {200, 429}
        pages = [await http.get(f"/debug/requests/client-{n}", headers=admin) for n in range(REQUESTS)]
        capture = await http.get("/debug/capture", headers=admin)
        costs = (await http.get("/debug/costs", headers=admin)).json()["models"][0]

    served = [(answer, page.json()) for answer, page in zip(answers, pages, strict=True) if answer.is_success]
    assert len(served) > REQUESTS / 2
    for answer, receipt in served:
        assert_consistent(answer, receipt)
    waited = [receipt["queue"]["causes"] for _, receipt in served if receipt["queue"]["causes"]]
    # The first burst alone exceeds the replicas' capacity; later waits depend on the client's speed.
    assert len(waited) > REQUESTS / 10
    causes = {each["cause"] for of_request in waited for each in of_request}
    assert causes >= {"engines_busy", "higher_class", "other_tenants", "own_requests"}
    assert "before_scheduler" not in causes

    assert {row["tenant"] for row in costs["rows"]} >= {f"tenant-{number}" for number in range(4)}
    # Three replicas; every engine second with requests is charged to a tenant.
    assert 1 < sum(row["engine_seconds"] for row in costs["rows"]) <= 3 * costs["counted_s"]
    assert sum(row["imposed_delay_seconds"] for row in costs["rows"]) > 0

    captured = tmp_path / "captured.jsonl"
    captured.write_bytes(capture.content)
    trace = load_trace(captured)
    assert len(trace.requests) >= len(served)
    assert {request.priority.value for request in trace.requests} >= set(CLASSES)
    assert "tenant-" not in capture.text
    assert "word" not in capture.text


def assert_consistent(answer: httpx.Response, receipt: dict[str, Any]) -> None:
    """Assert that a receipt is consistent and agrees with its answer."""
    queue, summary = receipt["queue"], json.loads(answer.headers["x-ewsjf-receipt"])
    wait_ms = queue["ms"]
    assert receipt["outcome"] == "completed"
    assert wait_ms == pytest.approx(float(answer.headers["x-queue-wait-ms"]), abs=0.1)
    assert wait_ms == pytest.approx(summary["wait_ms"], abs=0.01)
    for causes_ms in ([each["ms"] for each in queue["causes"]], summary["causes_ms"].values()):
        # The shortest waits have no causes.
        assert sum(causes_ms) == pytest.approx(wait_ms, abs=0.01 if queue["causes"] else 1)
    assert all(each["ms"] > 0 and each["meaning"] for each in queue["causes"])
    stages = {each["stage"]: each["ms"] for each in receipt["stages"]}
    assert stages["queue"] == wait_ms
    # Gateway and scheduler share the machine's clock; figures are rounded.
    assert min(stages.values()) > -0.01, receipt
    assert receipt["attempts"][-1]["pool"] == answer.headers["x-pool"]
    assert receipt["tokens"]["output"] > 0
