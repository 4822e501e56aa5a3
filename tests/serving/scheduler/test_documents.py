"""Overview: replicas and pools, with bounded size for a large fleet."""

import re
from time import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from serve_app.core import events as ev
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass, RequestTimes, Usage
from serve_app.serving.scheduler.documents import (
    captured,
    captured_in_full,
    limit_text,
    overview,
    replica_documents,
    replica_state,
    slowest,
)
from serve_app.serving.scheduler.findings import time_text
from serve_app.serving.scheduler.journal import RequestHistory
from tests.builders import fill, one_replica, request
from tests.serving.scheduler.test_receipts import HistoryHarness

REPORT: dict[str, Any] = {
    "running": 4,
    "waiting": 1,
    "kv_usage_ratio": 0.5,
    "tpot_s": 0.02,
    "draining": False,
}


def replica(pool: str = "short", report: dict[str, Any] | None = REPORT, **changes: Any) -> dict[str, Any]:
    held = {"peak_tokens": 300, "budget_tokens": 1_000, "pending_prefill_tokens": 40}
    spec = {"pool": pool, "max_num_seqs": 16, "max_model_len": 2_048, "in_flight": 5, "stale": False}
    document = {**spec, **held, "report": report, **changes}
    return {**document, "state": replica_state(document)}


def shown(
    replicas: dict[str, Any],
    served: dict[str, dict[str, float]] | None = None,
    endpoints: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    status = {
        "model": "m",
        "replicas": replicas,
        "pools": ["short", "long"],
        "waiting": {"batch": 2},
        "endpoints": endpoints or [],
    }
    queue = {
        "waiting": 2,
        "settings": {"policy": "ewsjf"},
        "sub_queues": [],
        "sub_queues_omitted": 3,
        "served": served or {},
    }
    return overview(status, queue, {"slots": 1})


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "ready"),
        ({"gated": True}, "gated"),
        ({"suspended": True}, "suspended"),
        ({"hangs": True, "gated": True}, "hangs"),
        ({"report": None}, "no report yet"),
        ({"report": {**REPORT, "draining": True}, "suspended": True}, "draining"),
        ({"stale": True, "suspended": True}, "stale"),
    ],
)
def test_the_state_is_what_an_operator_should_know_first(changes: dict[str, Any], state: str) -> None:
    (found,) = shown({"a": replica(**changes)})["replicas"]
    assert found["state"] == state


def test_the_limit_of_a_replica_names_its_source() -> None:
    configured = one_replica(limits={"max_num_seqs": 8}).scheduler.ledger["r1"]
    assert limit_text(configured, 0.0) == "8 (configured)"

    driver = one_replica(limits={"max_num_seqs": None})
    state = driver.scheduler.ledger["r1"]
    assert limit_text(state, driver.now) == "its queue (reported)"
    for _ in range(5):
        driver.report("r1", waiting=2, running=16, after_s=0.5)
    assert limit_text(state, driver.now) == "16 and its queue (reported)"

    driver.report("r1", waiting=None, running=None)
    assert limit_text(state, driver.now) == "no limit seen (at most 32 unstarted)"
    learned = state.learned_limit
    assert learned is not None
    learned.limit, learned.since, learned.delay_s = 16, driver.now - 60.0, 0.84
    earliest, shown, latest = time() - 60.0, limit_text(state, driver.now), time() - 60.0
    assert shown in {
        f"16 in flight, learned {time_text(each)} (starts were 0.8 s late)" for each in (earliest, latest)
    }
    learned.counts_unstarted, learned.delay_s = True, 0.0
    assert re.fullmatch(
        r"16 unstarted, learned .* UTC \(it rejected a request\)", limit_text(state, driver.now)
    )


def test_a_document_shows_whether_its_replica_takes_more() -> None:
    driver = one_replica()
    state = driver.scheduler.ledger["r1"]
    reports = {"r1": (state.spec, state.report)}
    for is_open in (True, False):
        document = replica_documents(driver.scheduler, reports, driver.now)["r1"]
        assert (document["open"], document["limit"], document["state"]) == (
            is_open,
            "8 (configured)",
            "ready",
        )
        fill(driver)


def test_pools_are_summed_over_all_replicas() -> None:
    fleet = {"a": replica(), "b": replica(report={**REPORT, "kv_usage_ratio": 0.7}), "c": replica(stale=True)}
    short, long = shown(fleet)["pools"]
    assert (short["replicas"], short["ready"], short["in_flight"], short["running"]) == (3, 2, 15, 12)
    assert (short["peak_tokens"], short["budget_tokens"]) == (900, 3_000)
    assert short["kv_usage_ratio"] == pytest.approx((0.5 + 0.7 + 0.5) / 3)
    assert (long["replicas"], long["kv_usage_ratio"]) == (0, None)


def test_an_endpoint_that_is_down_counts_as_a_replica_that_is_not_ready() -> None:
    down = [{"url": "http://b", "replica": "b", "reason": "gave no answer: refused", "since": 1.0}]
    found = shown({"a": replica()}, endpoints=[{"pool": "short", "endpoints": 2, "down": down}])
    first, second = found["replicas"]
    assert (first["replica"], first["state"], first["reason"]) == ("b", "down", "gave no answer: refused")
    assert (second["replica"], second["state"]) == ("a", "ready")
    short = found["pools"][0]
    assert (short["ready"], short["replicas"], short["budget_tokens"]) == (1, 2, 1_000)


def test_a_pool_whose_engines_do_not_report_their_cache_has_no_budget() -> None:
    fleet = {"a": replica(), "b": replica(budget_tokens=None, report={**REPORT, "kv_usage_ratio": None})}
    short = shown(fleet)["pools"][0]
    assert (short["peak_tokens"], short["budget_tokens"], short["kv_usage_ratio"]) == (600, None, 0.5)


def test_of_a_large_fleet_those_that_need_attention_are_shown() -> None:
    fleet = {f"r{number:04}": replica(stale=number % 100 == 99) for number in range(1_000)}
    tenants = {f"t{number}": float(number) for number in range(1_000)}
    found = shown(fleet, {"batch": tenants})
    assert [each["state"] for each in found["replicas"][:11]] == ["stale"] * 10 + ["ready"]
    assert (len(found["replicas"]), found["replicas_omitted"]) == (100, 900)
    assert found["pools"][0]["ready"] == 990
    assert len(found["served"]["batch"]) == 50
    assert found["served"]["batch"]["t999"] == 999.0
    assert (found["waiting"], found["waiting_requests"], found["sub_queues_omitted"]) == ({"batch": 2}, 2, 3)
    assert "settings" not in found
    assert len(msgspec.json.encode(found)) < 60_000


def ended(name: str, *, ttft_s: float | None, wait_s: float, ended_at: float = 99.0) -> Any:
    times = RequestTimes(
        "/v1/completions", 0.1, wait_s, None if ttft_s is None else ttft_s - wait_s - 0.1, 9.0
    )
    request = SimpleNamespace(tenant="t", priority=PriorityClass.BATCH)
    conclude = SimpleNamespace(conclusion=Conclusion(Outcome.COMPLETED))
    return SimpleNamespace(
        request_id=name,
        request=request,
        times=times,
        conclude=conclude,
        pool="short",
        wait_s=wait_s,
        arrived_at=ended_at - 10.0,
        ended_at=ended_at,
    )


def test_the_slowest_first_tokens_are_first_and_few() -> None:
    records = [ended(f"r{number}", ttft_s=1.0 + number, wait_s=0.5) for number in range(12)]
    records.append(ended("whole", ttft_s=None, wait_s=11.5))
    queried: list[float] = []

    def ended_since(since: float) -> Any:
        queried.append(since)
        return iter(records)

    found = slowest(cast("RequestHistory", SimpleNamespace(ended_since=ended_since)), 100.0)
    assert queried == [40.0]
    # An answer in one piece counts with its queue time.
    assert [each["request_id"] for each in found] == [
        "r11",
        "whole",
        *(f"r{number}" for number in range(10, 2, -1)),
    ]
    assert (found[0]["ttft_s"], found[1]["ttft_s"]) == (pytest.approx(12.0), None)
    assert (found[0]["total_s"], found[0]["ended_s_ago"]) == (10.0, 1.0)


def in_full(history: RequestHistory) -> list[dict[str, Any]]:
    parts = captured_in_full(history)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return cast("list[dict[str, Any]]", end.value)


def test_a_full_capture_has_every_request_with_its_times() -> None:
    harness = HistoryHarness(one_replica())
    fill(harness.driver)
    for name in ("served", "failed", "open"):
        harness.arrive(request(name, arrived_at=harness.driver.now, tenant="acme"))
    times = RequestTimes("/v1/completions", 0.0, 1.0, 0.25, 0.5)
    usage = Usage(prompt_tokens=50, output_tokens=5, cached_tokens=16)
    harness.feed(ev.Finished("f0", Outcome.COMPLETED, usage, times), after_s=1.0)
    harness.end("served", times, usage, after_s=0.5)
    harness.feed(ev.Finished("failed", Outcome.FAILED, None, times), after_s=0.25)

    lines = in_full(harness.history)
    assert [line["outcome"] for line in lines] == ["completed", "failed", None]
    served, failed, still_open = lines
    assert (served["input_length"], served["output_length"], served["cached_length"]) == (50, 5, 16)
    assert (served["queue_s"], served["ttft_s"], served["total_s"]) == (1.0, 1.25, 1.5)
    assert (served["tenant"], served["replica"]) == ("acme", "r1")
    assert served["causes_s"] == {"engines_busy": 1.0}
    assert (failed["output_length"], still_open["total_s"]) == (0, None)
    # Only a full capture has the names of tenants, and requests that did not complete.
    (shared,) = captured(harness.history)
    assert shared.keys() == {
        *("timestamp", "input_length", "output_length"),
        *("hash_ids", "tenant", "priority"),
    }
    assert shared["tenant"] != "acme"
