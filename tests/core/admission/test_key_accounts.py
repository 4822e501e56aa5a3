"""API key limits in the scheduler."""

import math
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import (
    Cancelled,
    Finished,
    Resumed,
    Woke,
)
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ManualDriver, concluded, dispatched, key, one_replica, only_conclusion, request

# An exact prompt of 40 tokens and an output limit of 10, which is also the estimated output.
TOKENS = 50


def fleet(*, seats: int = 100, **changes: Any) -> ManualDriver:
    """Return one replica with fresh reports and room for this many requests."""
    backpressure = BackpressureSettings(target_waiting=1, lag_factor=0.0, report_limit_s=1e6)
    if seats > 1:
        backpressure = replace(backpressure, target_waiting=seats)
    return one_replica(backpressure=backpressure, limits={"max_num_seqs": seats}, **changes)


def rejected(driver: ManualDriver, request_id: str, **fields: Any) -> Conclude:
    (command,) = driver.arrive(request_id, **fields)
    assert isinstance(command, Conclude)
    return command


def granted(driver: ManualDriver, request_id: str, **fields: Any) -> Dispatch:
    (command,) = driver.arrive(request_id, **fields)
    assert isinstance(command, Dispatch)
    return command


def finish(driver: ManualDriver, request_id: str, output_tokens: int = 10) -> None:
    driver.feed(Finished(request_id, Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=output_tokens)))


def test_requests_beyond_the_limit_of_a_minute_are_rejected_with_the_limit_and_the_time() -> None:
    driver = fleet()
    limited = key(requests_per_minute=2)
    assert granted(driver, "a", key=limited).rate_limits is not None
    driver.now = 10.0
    granted(driver, "b", key=limited)
    driver.now = 20.0
    conclusion = rejected(driver, "c", key=limited).conclusion
    assert conclusion.outcome is Outcome.REJECTED_RATE_LIMITED
    assert "limit of 2 requests per minute" in conclusion.message
    assert conclusion.retry_after_s == 41.0
    driver.now = 61.0
    granted(driver, "d", key=limited)


def test_grants_and_rejections_carry_the_state_of_the_limits() -> None:
    driver = fleet()
    limited = key(requests_per_minute=2, tokens_per_minute=120)
    first = granted(driver, "a", key=limited).rate_limits
    assert first is not None
    assert first.requests is not None
    assert first.tokens is not None
    assert (first.requests.limit, first.requests.remaining, first.requests.reset_s) == (2, 1, 61.0)
    assert (first.tokens.limit, first.tokens.remaining) == (120, 70)
    granted(driver, "b", key=limited)
    last = rejected(driver, "c", key=limited).conclusion.rate_limits
    assert last is not None
    assert last.requests is not None
    assert last.requests.remaining == 0
    assert granted(driver, "other", key=key("k2")).rate_limits is None


def test_each_key_has_its_own_account_also_within_a_tenant() -> None:
    driver = fleet()
    granted(driver, "a", key=key("k1", requests_per_minute=1))
    rejected(driver, "b", key=key("k1", requests_per_minute=1))
    granted(driver, "c", key=key("k2", requests_per_minute=1))
    granted(driver, "d")


def test_tokens_are_charged_as_estimated_and_settled_as_counted() -> None:
    driver = fleet()
    limited = key(tokens_per_minute=2 * TOKENS)
    granted(driver, "a", key=limited)
    granted(driver, "b", key=limited)
    conclusion = rejected(driver, "c", key=limited).conclusion
    assert "limit of 100 tokens per minute: 100 are used and this request is estimated at 50" in (
        conclusion.message
    )
    finish(driver, "a", output_tokens=0)
    rejected(driver, "d", key=limited)
    finish(driver, "b", output_tokens=0)
    # 80 of 100 are used.
    granted(driver, "e", key=limited, prompt_tokens=10)


def test_tokens_beyond_the_estimate_are_charged_once_the_engine_reports_them() -> None:
    driver = fleet()
    limited = key(tokens_per_minute=100)
    granted(driver, "a", key=limited)
    driver.now = 30.0
    finish(driver, "a", output_tokens=60)
    # 50 are charged at arrival, 50 more at the end.
    driver.now = 61.0
    status = granted(driver, "b", key=limited).rate_limits
    assert status is not None
    assert status.tokens is not None
    assert status.tokens.remaining == 0


def test_a_request_larger_than_the_limit_gets_no_retry_after() -> None:
    conclusion = rejected(fleet(), "a", key=key(tokens_per_minute=TOKENS - 1)).conclusion
    assert conclusion.retry_after_s is None
    assert "which is more than the limit" in conclusion.message


def test_a_limit_on_concurrent_requests_counts_those_that_wait() -> None:
    driver = fleet(seats=1)
    limited = key(concurrent=4)
    for name in "abcd":
        driver.arrive(name, key=limited)
    assert len(driver.scheduler.queue) == 3
    conclusion = rejected(driver, "e", key=limited).conclusion
    assert "limit of 4 concurrent requests" in conclusion.message
    assert conclusion.retry_after_s == 1.0
    finish(driver, "a")
    assert not concluded(driver.arrive("f", key=limited))


def test_a_limit_on_waiting_requests_leaves_those_that_run_alone() -> None:
    driver = fleet(seats=1)
    limited = key(queued=1)
    for name in "ab":
        driver.arrive(name, key=limited)
    assert len(driver.scheduler.queue) == 1
    conclusion = rejected(driver, "e", key=limited).conclusion
    assert conclusion.outcome is Outcome.REJECTED_RATE_LIMITED
    assert "limit of 1 queued requests" in conclusion.message
    assert not concluded(driver.arrive("f", key=key("k2", queued=1)))


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "concurrent"])
def test_a_request_that_is_rejected_for_another_reason_is_not_counted(limit: str) -> None:
    driver = fleet(seats=1, max_waiting=1)
    limited = key("k1", **{limit: TOKENS if limit == "tokens_per_minute" else 1})
    for name in "wxyz":
        driver.arrive(name)
    assert only_conclusion(driver.arrive("a", key=limited)).outcome is Outcome.REJECTED_QUEUE_FULL
    finish(driver, "w")
    finish(driver, "x")
    assert dispatched(driver.arrive("b", key=limited))


def test_an_expired_or_cancelled_request_counts_as_a_request_without_tokens() -> None:
    driver = fleet(seats=1)
    limited = key(requests_per_minute=10, tokens_per_minute=3 * TOKENS)
    for name in "wxy":
        driver.arrive(name)
    driver.arrive("a", key=limited, expires_at=5.0)
    driver.arrive("b", key=limited)
    driver.feed(Cancelled("b"))
    driver.now = 6.0
    assert ("a", "expired") in concluded(driver.feed(Woke()))
    status = driver.scheduler.admission.keys.status(limited, driver.now)
    assert status is not None
    assert status.requests is not None
    assert status.tokens is not None
    assert (status.requests.remaining, status.tokens.remaining) == (8, 3 * TOKENS)


def test_an_answer_that_its_client_breaks_off_costs_the_estimate() -> None:
    driver = fleet()
    limited = key(tokens_per_minute=TOKENS)
    granted(driver, "a", key=limited)
    driver.feed(Cancelled("a"))
    rejected(driver, "b", key=limited)


def test_a_failed_request_costs_no_tokens() -> None:
    driver = fleet()
    limited = key(tokens_per_minute=TOKENS)
    granted(driver, "a", key=limited)
    driver.feed(Finished("a", Outcome.FAILED))
    granted(driver, "b", key=limited)


def test_a_new_scheduler_admits_what_the_former_one_had_admitted() -> None:
    driver = fleet()
    driver.now = 1_000.0
    limited = key(requests_per_minute=2, concurrent=100)
    driver.feed(Resumed(request("running", key=limited, arrived_at=400.0), "r1", started=True))
    for number in range(5):
        assert not concluded(driver.arrive(f"old{number}", key=limited, arrived_at=900.0 + number))
    granted(driver, "new1", key=limited)
    granted(driver, "new2", key=limited)
    rejected(driver, "new3", key=limited)
    assert driver.scheduler.admission.keys.open_requests("k1") == 8


def test_the_weight_of_a_key_decides_the_share_of_its_tenant() -> None:
    driver = fleet(seats=1)
    for number in range(40):
        driver.arrive(f"a{number}", tenant="a", key=key("ka", weight=3.0))
        driver.arrive(f"b{number}", tenant="b", key=key("kb"))
    served: list[str] = []
    running = [
        found.request.request_id for found in driver.scheduler.requests.of_gateway("g1") if not found.queued
    ]
    while len(served) < 40:
        ended = running.pop(0)
        served.append(ended)
        usage = Usage(prompt_tokens=40, output_tokens=10)
        commands = driver.feed(Finished(ended, Outcome.COMPLETED, usage), after_s=0.01)
        running += [name for name, _ in dispatched(commands)]
    assert 27 <= sum(name.startswith("a") for name in served) <= 33


def test_idle_accounts_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.core.admission.key_limits._MAX_ACCOUNTS", 10)
    driver = fleet()
    for number in range(50):
        granted(driver, f"a{number}", key=key(f"k{number}", requests_per_minute=1))
        finish(driver, f"a{number}")
        driver.now += 10.0
        assert len(driver.scheduler.admission.keys) <= 10


def test_weights_of_idle_tenants_are_forgotten_and_those_of_queued_requests_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.core.queueing.fairness._MAX_IDLE", 10)
    driver = fleet(seats=1)
    weights = driver.scheduler.queue.weights
    weighted = key(weight=3.0)
    for number in range(3):
        driver.arrive(f"waits{number}", tenant="waits", key=weighted)
    for number in range(50):
        driver.arrive(f"a{number}", tenant=f"t{number}", key=weighted)
        driver.feed(Cancelled(f"a{number}"))
    known = [each for each in range(50) if weights.of(f"t{each}") == 3.0]
    assert weights.of("waits") == 3.0
    assert len(known) <= 12
    assert known[-1] == 49


def test_a_key_without_limits_per_minute_has_no_rate_limit_status() -> None:
    driver = fleet()
    assert driver.scheduler.admission.keys.status(key(concurrent=3), 0.0) is None
    assert granted(driver, "a", key=key(concurrent=3)).rate_limits is None
    assert math.isinf(driver.find("a").request.expires_at)
