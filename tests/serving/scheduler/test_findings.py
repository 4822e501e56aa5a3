"""Findings about one model; tests/cli/test_diagnosis.py has what the command shows."""

from datetime import UTC, datetime
from typing import Any

import pytest

from serve_app.serving.scheduler.findings import (
    Severity,
    endpoints_down,
    findings_document,
    queue_findings,
    status_findings,
)

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
        (90_000, 10_000, 60, "engines that other clients use"),
        (10_000, 90_000, 60, "the engines cache more"),
        (90_000, 10_000, 40, ""),
        (90_000, 75_000, 60, ""),
        # As much as the blocks of the index explain.
        (10_000, 90_000, 400, ""),
    ],
)
def test_a_prefix_index_that_is_wrong_is_found(
    predicted: float, reported: float, requests: float, step: str
) -> None:
    recent = {
        "requests": requests,
        "prompt_tokens": 100_000.0,
        "predicted_tokens": predicted,
        "reported_tokens": reported,
    }
    found = status_findings({**STATUS, "prefix": {"short": recent}})
    assert [each.next_step.startswith(step) for each in found] == ([True] if step else [])
    assert all(f"expected {predicted:,} in the cache" in each.what for each in found)


def replica(state: str = "ready", *, is_open: bool = False, pool: str = "short") -> dict[str, Any]:
    return {
        "pool": pool,
        "state": state,
        "open": is_open,
        "limit": "16 in flight, learned 12:03 UTC (starts were 0.8 s late)",
        "stale": state == "stale",
        "report": REPORT,
    }


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (
            [replica(), replica()],
            "2 replicas accepts more (2 at the limit)",
        ),
        (
            [replica(), replica("gated"), replica("gated")],
            "3 replicas accepts more (1 at the limit, 2 gated)",
        ),
        ([replica(), replica(is_open=True)], None),
        ([replica(pool="long"), replica(is_open=True)], None),
    ],
)
def test_waiting_requests_beside_replicas_that_take_no_more_are_found_with_the_cause(
    replicas: list[dict[str, Any]], expected: str | None
) -> None:
    status = {
        **STATUS,
        "waiting_by_pool": {"short": 581},
        "replicas": {f"s{i}": each for i, each in enumerate(replicas)},
    }
    found = [
        f"{each.severity.name}: {each.what.removeprefix('model demo: ')}" for each in status_findings(status)
    ]
    assert found == [
        f"RISK: 581 requests wait for pool short, and none of its {expected}; limit of s0: 16 in flight, "
        f"learned 12:03 UTC (starts were 0.8 s late)"
        for _ in range(expected is not None)
    ]


def test_replicas_that_do_not_answer_are_found_while_others_serve() -> None:
    status = {**STATUS, "replicas": {"s1": replica("hangs"), "s2": replica(is_open=True)}}
    (found,) = status_findings(status)
    assert found.severity is Severity.DEGRADED
    assert found.what == "model demo: 1 of 2 replicas do not answer their requests: s1"


def test_a_queue_that_grows_is_found_with_what_its_oldest_request_waits_for() -> None:
    head = {"priority": "batch", "wait_s": 9.0, "reason": "short: every replica is at its limit"}
    queue = {**QUEUE, "waiting": 581, "max_waiting": None, "grown_from": 181, "sub_queues": [head]}
    (found,) = queue_findings(queue)
    assert found.severity is Severity.RISK
    assert found.what == (
        "model demo: the queue has grown for 20 s, from 181 to 581 requests; the oldest one waits because "
        "short: every replica is at its limit"
    )
    assert not list(queue_findings({**queue, "grown_from": None}))


@pytest.mark.parametrize(
    ("requests", "error_s", "is_found"), [(20, 6.0, True), (20, 5.0, False), (19, 6.0, False)]
)
def test_predicted_waits_that_are_off_by_more_than_half_are_found(
    requests: float, error_s: float, is_found: bool
) -> None:
    recent = {"requests": requests, "predicted_s": 4.0, "waited_s": 10.0, "error_s": error_s}
    found = list(status_findings({**STATUS, "predictions": {"batch": recent}}))
    expected = (
        "model demo: predicted queue times of class batch are off by 6.0 s on average: 4.0 s predicted, and "
        "10.0 s waited (20 recent requests)"
    )
    assert [each.what for each in found] == [expected] * is_found


def test_a_time_of_today_is_shown_without_its_date() -> None:
    now = datetime.now(UTC)
    down = {"url": "http://b:1", "reason": "http://b:1/metrics gave no answer", "since": now.timestamp()}
    (line,) = endpoints_down({"endpoints": [{"pool": "all", "endpoints": 2, "down": [down]}]})
    assert line == (
        f"1 of 2 endpoints of pool all down: http://b:1/metrics gave no answer, since {now:%H:%M:%S} UTC"
    )
