"""Findings about one model; tests/cli/test_status.py has what the command shows."""

from collections.abc import Mapping
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
LIMIT = "16 in flight, learned 12:03 UTC (starts were 0.8 s late)"


def replica(state: str = "ready", pool: str = "short", *, is_open: bool = False) -> dict[str, Any]:
    return {
        "pool": pool,
        "state": state,
        "open": is_open,
        "limit": LIMIT,
        "stale": state == "stale",
        "report": None if state == "no report yet" else {"waiting": 0, "running": 0, "kv_usage_ratio": 0},
    }


STATUS: dict[str, Any] = {
    "model": "demo",
    "ended": "",
    "waiting": {},
    "replicas": {"s1": replica(is_open=True)},
}


def fleet(*replicas: dict[str, Any], waiting: int = 0) -> dict[str, Any]:
    """Return a status with these replicas, and requests that wait for pool short."""
    return {
        "replicas": {f"s{number}": each for number, each in enumerate(replicas)},
        "waiting_by_pool": {"short": waiting},
    }


def cached(predicted: float, reported: float, requests: float = 60) -> dict[str, Any]:
    tokens = {"prompt_tokens": 100_000.0, "predicted_tokens": predicted, "reported_tokens": reported}
    return {"prefix": {"short": {"requests": requests, **tokens}}}


def waits(requests: float, error_s: float) -> dict[str, Any]:
    recent = {"requests": requests, "predicted_s": 4.0, "waited_s": 10.0, "error_s": error_s}
    return {"predictions": {"batch": recent}}


OFF = (
    "RISK: predicted queue times of class batch are off by 6.0 s on average: 4.0 s predicted, and 10.0 s "
    "waited (20 recent requests)"
)


def full(replicas: str) -> str:
    return f"RISK: 581 requests wait for pool short, and none of its {replicas}; limit of s0: {LIMIT}"


WRONG = "NOTE: the prefix index is wrong for pool short: of 100,000 recent prompt tokens, it expected "


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, None),
        ({"error": "it is gone"}, "DOWN: it is gone; new requests are queued until it is back"),
        (fleet(replica("draining")), "DOWN: no replica of pool short accepts requests (1 draining)"),
        (
            fleet(replica("suspended"), replica("draining"), replica("gated", "long")),
            "DEGRADED: no replica of pool short accepts requests (1 draining, 1 suspended)",
        ),
        (fleet(replica("draining"), replica()), None),
        (
            fleet(replica("draining"), replica("hangs", "long"), replica("no report yet", "long")),
            [
                "DOWN: no replica of pool short accepts requests (1 draining)",
                "DOWN: no replica of pool long accepts requests (1 hangs, 1 no report yet)",
                "DEGRADED: 1 of 3 replicas have no recent load report, so they receive no requests: s2",
                "DEGRADED: 1 of 3 replicas do not answer their requests: s1",
            ],
        ),
        (
            fleet(replica(is_open=True), replica("hangs")),
            "DEGRADED: 1 of 2 replicas do not answer their requests: s1",
        ),
        (cached(90_000, 10_000), WRONG + "90,000 in the cache, and engines reported 10,000"),
        (cached(10_000, 90_000), WRONG + "10,000 in the cache, and engines reported 90,000"),
        (cached(90_000, 10_000, requests=40), None),
        (cached(90_000, 75_000), None),
        # As much as the blocks of the index explain.
        (cached(10_000, 90_000, requests=400), None),
        (fleet(replica(), replica(), waiting=581), full("2 replicas accepts more (2 at the limit)")),
        (
            fleet(replica(), replica("gated"), replica("gated"), waiting=581),
            full("3 replicas accepts more (1 at the limit, 2 gated)"),
        ),
        (fleet(replica(), replica(is_open=True), waiting=581), None),
        (fleet(replica(pool="long"), replica(is_open=True), waiting=581), None),
        (waits(20, error_s=6.0), OFF),
        (waits(20, error_s=5.0), None),
        (waits(19, error_s=6.0), None),
    ],
)
def test_a_status_has_these_findings(status: Mapping[str, Any], expected: str | list[str] | None) -> None:
    found = [
        f"{each.severity.name}: {each.what.removeprefix('model demo: ')}"
        for each in status_findings({**STATUS, **status})
    ]
    assert found == (expected if isinstance(expected, list) else [] if expected is None else [expected])


def test_the_step_after_a_wrong_prefix_index_depends_on_its_sign() -> None:
    (too_many,) = status_findings({**STATUS, **cached(90_000, 10_000)})
    (too_few,) = status_findings({**STATUS, **cached(10_000, 90_000)})
    assert too_many.next_step.startswith("engines that other clients use")
    assert too_few.next_step.startswith("the engines cache more")


def test_endpoints_that_sleep_are_a_note() -> None:
    def found(*asleep: str) -> list[tuple[Severity, str]]:
        pool = {"pool": "short", "endpoints": 9, "down": [], "asleep": list(asleep)}
        status = {**STATUS, "endpoints": [pool]}
        return [(each.severity, each.what.removeprefix("model demo: ")) for each in status_findings(status)]

    assert found() == []
    assert found("http://a", "http://b") == [
        (
            Severity.NOTE,
            "2 of 9 endpoints of pool short sleep and receive no requests: http://a, http://b",
        )
    ]
    ((_, text),) = found(*(f"http://{name}" for name in "abcdefg"))
    assert text.endswith("http://a, http://b, http://c, http://d, http://e and 2 more")


def test_floors_that_are_not_kept_are_named_with_what_the_fleet_serves() -> None:
    def floor(subject: str, behind_s: float) -> dict[str, Any]:
        return {
            "subject": subject,
            "floor_tokens_per_s": 3_000.0,
            "received_tokens_per_s": 2_000.0,
            "behind_s": behind_s,
        }

    floors = {"tokens_per_s": 6_000.0, "served_tokens_per_s": 4_400.0}
    kept = {**floors, "subjects": [floor("tenant a", 7.0), floor("class batch", 0.0)]}
    assert list(queue_findings({**QUEUE, "floors": kept})) == []
    behind = [floor("tenant a", 9.0), floor("class batch", 8.5), floor("tenant b", 0.0)]
    (found,) = queue_findings({**QUEUE, "floors": {**floors, "subjects": behind}})
    assert found.severity is Severity.DEGRADED
    assert found.what == (
        "model demo: 2 floors are not kept: tenant a gets 2,000 of 3,000 tokens/s; all floors add up to "
        "6,000, and the fleet serves 4,400"
    )


def test_the_most_severe_come_first() -> None:
    status = {
        **STATUS,
        "tuner": {"frozen": "frozen by an operator"},
        "pools": ["short", "long"],
        "replicas": {"s1": replica("stale")},
    }
    found = findings_document(status, {**QUEUE, "waiting": 9})
    assert [each["severity"] for each in found] == ["down", "degraded", "risk", "note"]
    assert found[0]["what"].startswith("model demo: 1 of 1 replicas have no recent load report")
    assert found[-1]["next_step"] == "thaw it: ewsjf status --thaw-tuner"


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


def test_a_time_of_today_is_shown_without_its_date() -> None:
    now = datetime.now(UTC)
    down = {"url": "http://b:1", "reason": "http://b:1/metrics gave no answer", "since": now.timestamp()}
    (line,) = endpoints_down({"endpoints": [{"pool": "all", "endpoints": 2, "down": [down]}]})
    assert line == (
        f"1 of 2 endpoints of pool all down: http://b:1/metrics gave no answer, since {now:%H:%M:%S} UTC"
    )
