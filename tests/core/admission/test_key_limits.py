"""API key limits in the scheduler, and budgets of models."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.admission.key_limits import MinuteWindow, Spending, TokenPrices
from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Cancelled, DispatchFailed, DispatchFailure, Finished, Resumed, Woke
from serve_app.core.learned_state import learned_state, restore_state
from serve_app.core.scheduler import Scheduler
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.settings.application import settings_of
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


# -- window of a per-minute limit: exact for every minute, for any arrivals -------------------------------

LIMIT = 10
pauses = st.lists(
    st.tuples(st.floats(0, 25, allow_nan=False), st.integers(1, LIMIT)), min_size=1, max_size=60
)


def test_after_an_idle_minute_the_whole_limit_may_be_used_at_once() -> None:
    window = MinuteWindow()
    for _ in range(LIMIT):
        assert window.admits_in_s(1, LIMIT, 100.0) == 0
        window.add(100.0, 1, 100.0)
    assert window.admits_in_s(1, LIMIT, 100.0) == 61.0
    assert window.admits_in_s(1, LIMIT, 160.5) == 0.5
    assert window.admits_in_s(1, LIMIT, 161.0) == 0
    assert window.status(LIMIT, 161.0).remaining == LIMIT


def test_capacity_returns_in_the_order_of_use() -> None:
    window = MinuteWindow()
    window.add(0.0, 4, 0.0)
    window.add(30.0, 6, 30.0)
    assert window.admits_in_s(4, LIMIT, 30.0) == 31.0
    assert window.admits_in_s(5, LIMIT, 30.0) == 61.0
    assert window.admits_in_s(LIMIT + 1, LIMIT, 30.0) == math.inf
    status = window.status(LIMIT, 61.0)
    assert (status.remaining, status.reset_s) == (4, 30.0)


def test_a_refund_may_be_used_again_and_changes_nothing_older() -> None:
    window = MinuteWindow()
    window.add(0.0, 6, 0.0)
    window.subtract(0.0, 2)
    assert window.used == 4
    window.expire(61.0)
    window.subtract(0.0, 4)
    assert window.used == 0


def test_an_amount_older_than_a_minute_is_not_counted() -> None:
    window = MinuteWindow()
    window.add(10.0, 3, 75.0)
    window.add(20.0, 3, 75.0)
    assert window.used == 3


@given(pauses)
def test_no_minute_ever_admits_more_than_the_limit_and_no_rejection_is_longer_than_needed(
    steps: list[tuple[float, int]],
) -> None:
    window = MinuteWindow()
    now = 0.0
    admitted: list[tuple[float, int]] = []
    for pause_s, amount in steps:
        now += pause_s
        wait_s = window.admits_in_s(amount, LIMIT, now)
        if wait_s:
            now += wait_s
            # A sum of floats may be one ulp too small.
            rest_s = window.admits_in_s(amount, LIMIT, now)
            assert rest_s < 1e-9
            now += rest_s
        admitted.append((now, amount))
        window.add(now, amount, now)
        for end, _ in admitted:
            assert sum(some for at, some in admitted if end - 60 < at <= end) <= LIMIT


# -- budget per hour of a model whose tokens are paid -----------------------------------------------------

PRICE = TokenPrices(prompt=1_000_000.0, generated=10_000_000.0, cached=0.0)


def paid(per_hour: float = 100.0) -> ManualDriver:
    """Return one replica whose prompt tokens cost 1 and whose output tokens cost 10."""
    return one_replica("s1", price=PRICE, budget_per_hour=per_hour)


def spend(
    driver: ManualDriver, request_id: str, output_tokens: int, outcome: Outcome = Outcome.COMPLETED
) -> None:
    driver.arrive(request_id)
    # Cached prompts cost nothing here; a server that counts no prompt does not count.
    usage = Usage(prompt_tokens=40, output_tokens=output_tokens, cached_tokens=40)
    driver.feed(Finished(request_id, outcome, usage))


def test_prices_are_per_million_and_cached_tokens_may_cost_less() -> None:
    usage = Usage(prompt_tokens=3_000, output_tokens=500, cached_tokens=1_000)
    assert TokenPrices(prompt=2.0, generated=8.0).of(usage) == pytest.approx(0.006 + 0.004)
    assert TokenPrices(prompt=2.0, generated=8.0, cached=0.5).of(usage) == pytest.approx(0.0045 + 0.004)


def test_a_spent_budget_rejects_until_its_oldest_part_is_an_hour_old() -> None:
    driver = paid()
    spend(driver, "a", 6)
    driver.report(after_s=600.0)
    spend(driver, "b", 6)
    rejection = only_conclusion(driver.arrive("c"))
    assert rejection.outcome is Outcome.REJECTED_QUEUE_FULL
    assert "may cost 100 per hour, and the last hour has cost 120" in rejection.message
    # The first bucket of a minute ends an hour after its minute.
    assert rejection.retry_after_s == pytest.approx(3_660.0 - 600.0)
    driver.report(after_s=3_660.0 - 600.1)
    assert only_conclusion(driver.arrive("d")).outcome is Outcome.REJECTED_QUEUE_FULL
    driver.report(after_s=0.2)
    assert dispatched(driver.arrive("e")) == [("e", "s1")]


def test_a_failed_answer_costs_what_the_engine_counted_and_a_cancelled_one_its_estimate() -> None:
    driver = paid()
    spend(driver, "a", 6, Outcome.FAILED)
    driver.arrive("b", prompt_tokens=40)
    driver.feed(Finished("b", Outcome.CANCELLED))
    assert only_conclusion(driver.arrive("c")).outcome is Outcome.REJECTED_QUEUE_FULL


def test_a_failure_without_a_count_costs_nothing() -> None:
    driver = paid(per_hour=0.5)
    driver.arrive("a", prompt_tokens=400)
    driver.feed(Finished("a", Outcome.FAILED))
    assert driver.scheduler.admission.spending.rejection(driver.now) is None


def test_a_request_that_never_reached_an_engine_costs_nothing() -> None:
    driver = paid(per_hour=0.5)
    driver.report(draining=True)
    driver.arrive("a", prompt_tokens=400)
    driver.feed(Cancelled("a"))
    assert driver.scheduler.admission.spending.rejection(driver.now) is None


def test_without_a_budget_nothing_is_limited() -> None:
    driver = one_replica("s1", price=PRICE)
    spend(driver, "a", 1_000)
    assert driver.scheduler.admission.spending.rejection(driver.now) is None


def test_the_next_scheduler_continues_with_what_was_spent() -> None:
    driver = paid()
    spend(driver, "a", 12)
    driver.report(after_s=600.0)
    document = learned_state(driver.scheduler)
    successor = Scheduler(driver.scheduler.settings, now=5.0)
    restore_state(successor, document)
    conclusion = successor.admission.spending.rejection(5.0)
    assert conclusion is not None
    assert conclusion.retry_after_s == pytest.approx(3_660.0 - 600.0)


@pytest.mark.parametrize("state", [[(1.0, 5.0), (9.0, 5.0)], [(-1.0, 5.0)], [(1.0, -5.0)]])
def test_an_impossible_state_is_rejected(state: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="spending must have"):
        Spending(PRICE, 1.0).restore(state, 0.0)


def test_a_budget_needs_prices() -> None:
    pool = {"name": "p", "engine": {"emulated": {"profile": "llama3-70b-a100-tp8"}}}
    model = {"name": "m", "pools": [pool], "advanced": {"budget_per_hour": 5}}
    with pytest.raises(ValueError, match="model m: budget_per_hour needs price"):
        settings_of({"models": [model]})
    price = {"prompt": 0.15, "generated": 0.6}
    scheduler = settings_of({"models": [{**model, "price": price}]}).models[0].scheduler
    assert (scheduler.price, scheduler.budget_per_hour) == (TokenPrices(prompt=0.15, generated=0.6), 5)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_an_answer_that_ends_early_costs_at_least_what_was_seen_of_it(outcome: Outcome) -> None:
    driver = paid(per_hour=800.0)
    driver.arrive("a", prompt_tokens=40)
    driver.feed(Finished("a", outcome, seen_tokens=900))
    assert only_conclusion(driver.arrive("b")).outcome is Outcome.REJECTED_QUEUE_FULL


def test_a_request_that_is_left_after_a_put_back_costs_what_was_generated() -> None:
    driver = paid(per_hour=800.0)
    driver.arrive("a", prompt_tokens=40)
    driver.feed(DispatchFailed("a", "s1", DispatchFailure.LOST, generated_tokens=900))
    driver.feed(Cancelled("a"))
    assert only_conclusion(driver.arrive("b")).outcome is Outcome.REJECTED_QUEUE_FULL
