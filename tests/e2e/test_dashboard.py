"""Dashboard of a served application, through the real port."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.e2e.served import Served


def frames(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            (model,) = json.loads(line.removeprefix("data: "))["models"]
            yield model


def test_figures_flow_through_the_front_end_and_outlive_their_scheduler(app: Served) -> None:
    page = httpx.get(f"{app.url}/dashboard", timeout=10)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert httpx.get(f"{app.url}/dashboard/main.js", timeout=10).status_code == 200
    assert httpx.get(f"{app.url}/dashboard/events", timeout=10).status_code == 401
    body = {"model": "demo", "prompt": "hello", "max_tokens": 4, "stream": True}
    assert httpx.post(f"{app.url}/v1/completions", json=body, timeout=30).status_code == 200
    headers = app.application.admin_headers()
    with httpx.stream("GET", f"{app.url}/dashboard/events", headers=headers, timeout=60) as answer:
        shown = frames(answer)
        before = next(model for model in shown if "error" not in model)
        assert {pool["pool"]: pool["replicas"] for pool in before["pools"]} == {"short": 2, "long": 1}
        assert before["activity"]["last_minutes"]["default"]["outcomes"]["completed"] >= 1
        assert before["length_queues"]
        (scheduler,) = app.replicas("scheduler")
        scheduler.kill()
        snapshots = [next(shown)]
        while "error" in snapshots[-1] or snapshots[-1]["incarnation"] == before["incarnation"]:
            snapshots.append(next(shown))
            assert len(snapshots) < 60
        assert snapshots[-1]["incarnation"] > before["incarnation"]
        # The new scheduler has all replicas again within seconds.
        while sum(pool["ready"] for pool in snapshots[-1]["pools"]) < 3:
            snapshots.append(next(shown))
            assert len(snapshots) < 90
