"""Findings about one model; tests/cli/test_diagnosis.py has what the command shows."""

from datetime import UTC, datetime
from typing import Any

import pytest

from serve_app.serving.scheduler.findings import Severity, endpoints_down, findings_document, status_findings

QUEUE: dict[str, Any] = {"model": "demo", "waiting": 0, "max_waiting": 10, "sub_queues": []}
REPORT = {"waiting": 0, "running": 0, "kv_usage_ratio": 0}
STATUS: dict[str, Any] = {
    "model": "demo",
    "ended": "",
    "waiting": {},
    "replicas": {
        "s1": {"pool": "short", "stale": False, "report": {"waiting": 0, "running": 0, "kv_usage_ratio": 0}}
    },
}


def test_a_healthy_model_has_none() -> None:
    assert findings_document(STATUS, QUEUE) == []


def test_the_most_severe_come_first() -> None:
    status = {
        **STATUS,
        "tuner": {"frozen": "frozen by an operator"},
        "pools": ["short", "long"],
        "replicas": {"s1": {**STATUS["replicas"]["s1"], "stale": True}},
    }
    found = findings_document(status, {**QUEUE, "waiting": 9})
    assert [each["severity"] for each in found] == ["down", "degraded", "risk", "note"]
    assert found[0]["what"].startswith("model demo: 1 of 1 replicas have no recent load report")
    assert found[-1]["next_step"] == "thaw it: ewsjf status --thaw-tuner"


def test_a_scheduler_that_does_not_answer_is_the_only_finding() -> None:
    (found,) = status_findings({"model": "demo", "error": "its scheduler has not responded"})
    assert found.severity is Severity.DOWN


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"a": ("short", "draining")}, ["DOWN: no replica of pool short accepts requests (1 draining)"]),
        (
            {"a": ("short", "suspended"), "b": ("short", "draining"), "c": ("long", "gated")},
            ["DEGRADED: no replica of pool short accepts requests (1 draining, 1 suspended)"],
        ),
        ({"a": ("short", "draining"), "b": ("short", "ready")}, []),
    ],
)
def test_a_pool_that_accepts_nothing_is_found(
    states: dict[str, tuple[str, str]], expected: list[str]
) -> None:
    replicas = {
        name: {"pool": pool, "state": state, "stale": False, "report": REPORT}
        for name, (pool, state) in states.items()
    }
    found = status_findings({**STATUS, "replicas": replicas})
    assert [f"{each.severity.name}: {each.what.removeprefix('model demo: ')}" for each in found] == expected


@pytest.mark.parametrize(
    ("predicted", "reported", "requests", "step"),
    [
        (900, 100, 60, "engines that other clients use"),
        (100, 900, 60, "the engines cache more"),
        (900, 100, 40, ""),
        (900, 750, 60, ""),
    ],
)
def test_a_prefix_index_that_is_wrong_is_found(
    predicted: float, reported: float, requests: float, step: str
) -> None:
    recent = {
        "requests": requests,
        "prompt_tokens": 1_000.0,
        "predicted_tokens": predicted,
        "reported_tokens": reported,
    }
    found = status_findings({**STATUS, "prefix": {"short": recent}})
    assert [each.next_step.startswith(step) for each in found] == ([True] if step else [])
    assert all(f"expected {predicted:,} in the cache" in each.what for each in found)


def test_a_time_of_today_is_shown_without_its_date() -> None:
    now = datetime.now(UTC)
    down = {"url": "http://b:1", "reason": "http://b:1/metrics gave no answer", "since": now.timestamp()}
    (line,) = endpoints_down({"endpoints": [{"pool": "all", "endpoints": 2, "down": [down]}]})
    assert line == (
        f"1 of 2 endpoints of pool all down: http://b:1/metrics gave no answer, since {now:%H:%M:%S} UTC"
    )
