"""API key limits in the scheduler, and budgets of models."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.admission.key_limits import MinuteWindow, Spending, TokenPrices
from serve_app.core.commands import Dispatch
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Cancelled, DispatchFailed, DispatchFailure, Finished, Resumed, Woke
from serve_app.core.learned_state import learned_state, restore_state
from serve_app.core.scheduler import Scheduler
from serve_app.errors import Conclusion, Outcome
from serve_app.request import LimitStatus, RateLimitStatus, Usage
from serve_app.settings.application import settings_of
from tests.builders import ManualDriver, concluded, dispatched, key, one_replica, only_conclusion, request

# An exact prompt of 40 tokens and an output limit of 10, which is also the estimated output.
TOKENS = 50
PER_TOKEN = TokenPrices(prompt=1e6, generated=1e6)


def fleet(*, seats: int = 100, **changes: Any) -> ManualDriver:
    """Return one replica with fresh reports and room for this many requests."""
    backpressure = BackpressureSettings(target_waiting=seats, lag_factor=0.0, report_limit_s=1e6)
    return one_replica(backpressure=backpressure, limits={"max_num_seqs": seats}, **changes)


def rejected(driver: ManualDriver, request_id: str, **fields: Any) -> Conclusion:
    return only_conclusion(driver.arrive(request_id, **fields))


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
    conclusion = rejected(driver, "c", key=limited)
    assert conclusion.outcome is Outcome.REJECTED_RATE_LIMITED
    assert "limit of 2 requests per minute" in conclusion.message
    assert conclusion.retry_after_s == 41.0
    driver.now = 61.0
    granted(driver, "d", key=limited)


def test_grants_and_rejections_carry_the_state_of_the_limits() -> None:
    driver = fleet()
    limited = key(requests_per_minute=2, tokens_per_minute=120)
    first = granted(driver, "a", key=limited).rate_limits
    assert first == RateLimitStatus(LimitStatus(2, 1, 61.0), LimitStatus(120, 70, 61.0))
    granted(driver, "b", key=limited)
    last = rejected(driver, "c", key=limited).rate_limits
    assert last == RateLimitStatus(LimitStatus(2, 0, 61.0), LimitStatus(120, 20, 61.0))
    # Each key of a tenant has its own account.
    only_tokens = granted(driver, "d", key=key("k2", tokens_per_minute=60)).rate_limits
    assert only_tokens == RateLimitStatus(tokens=LimitStatus(60, 10, 61.0))
    assert granted(driver, "e", key=key("k3", concurrent=3)).rate_limits is None
    assert granted(driver, "f").rate_limits is None


def test_tokens_are_charged_as_estimated_and_settled_as_counted() -> None:
    driver = fleet()
    limited = key(tokens_per_minute=2 * TOKENS)
    granted(driver, "a", key=limited)
    granted(driver, "b", key=limited)
    conclusion = rejected(driver, "c", key=limited)
    text = "limit of 100 tokens per minute: 100 are used and this request is estimated at 50"
    assert text in conclusion.message
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
    # 50 were charged at arrival, a minute ago, and 50 more at the end.
    driver.now = 61.0
    status = granted(driver, "b", key=limited).rate_limits
    assert status == RateLimitStatus(tokens=LimitStatus(100, 0, 61.0))


def test_a_request_larger_than_the_limit_gets_no_retry_after() -> None:
    conclusion = rejected(fleet(), "a", key=key(tokens_per_minute=TOKENS - 1))
    assert conclusion.retry_after_s is None
    assert "which is more than the limit" in conclusion.message


def test_a_limit_on_concurrent_requests_counts_those_that_wait() -> None:
    driver = fleet(seats=1)
    limited = key(concurrent=4)
    for name in "abcd":
        driver.arrive(name, key=limited)
    assert len(driver.scheduler.queue) == 3
    conclusion = rejected(driver, "e", key=limited)
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
    conclusion = rejected(driver, "e", key=limited)
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


def test_a_request_that_ends_in_the_queue_counts_as_a_request_without_tokens() -> None:
    driver = fleet(seats=1, price=PER_TOKEN, budget_per_hour=1_000.0)
    limited = key(requests_per_minute=10, tokens_per_minute=3 * TOKENS)
    for name in "wxy":
        driver.arrive(name)
    driver.arrive("a", key=limited, expires_at=5.0)
    driver.arrive("b", key=limited)
    driver.feed(Cancelled("b"))
    driver.now = 6.0
    assert ("a", "expired") in concluded(driver.feed(Woke()))
    status = driver.scheduler.admission.keys.status(limited, driver.now)
    assert status == RateLimitStatus(LimitStatus(10, 8, 55.0), LimitStatus(3 * TOKENS, 3 * TOKENS, 0.0))
    assert driver.scheduler.admission.spending.state(driver.now) == []


@pytest.mark.parametrize(
    ("events", "used"),
    [
        # The engine's count, of a failed answer, too.
        ([Finished("a", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=3))], 43),
        ([Finished("a", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=60))], 100),
        ([Finished("a", Outcome.FAILED, Usage(prompt_tokens=40, output_tokens=6))], 46),
        # Without a count, the estimate of an answer that the engine may have computed.
        ([Finished("a", Outcome.COMPLETED)], TOKENS),
        ([Finished("a", Outcome.CANCELLED)], TOKENS),
        ([Cancelled("a")], TOKENS),
        ([Finished("a", Outcome.FAILED)], 0),
        # At least what was seen of it; the rest of an answer is estimated at one token or more.
        ([Finished("a", Outcome.CANCELLED, seen_tokens=900)], 940),
        ([Finished("a", Outcome.FAILED, seen_tokens=900)], 940),
        ([DispatchFailed("a", "r1", DispatchFailure.LOST, generated_tokens=900), Cancelled("a")], 941),
    ],
)
def test_a_dispatched_request_costs_its_key_and_its_model_what_was_computed(
    events: list[Finished | Cancelled | DispatchFailed], used: int
) -> None:
    driver = fleet(price=PER_TOKEN, budget_per_hour=1_000.0)
    limited = key(tokens_per_minute=1_000)
    granted(driver, "a", key=limited)
    for event in events:
        driver.feed(event)
    status = driver.scheduler.admission.keys.status(limited, driver.now)
    assert status == RateLimitStatus(tokens=LimitStatus(1_000, 1_000 - used, 61.0 if used else 0.0))
    assert sum(cost for _, cost in driver.scheduler.admission.spending.state(driver.now)) == used


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
    running: list[tuple[str, str]] = []
    for number in range(40):
        running += dispatched(driver.arrive(f"a{number}", tenant="a", key=key("ka", weight=3.0)))
        running += dispatched(driver.arrive(f"b{number}", tenant="b", key=key("kb")))
    served: list[str] = []
    while len(served) < 40:
        served.append(running.pop(0)[0])
        usage = Usage(prompt_tokens=40, output_tokens=10)
        running += dispatched(driver.feed(Finished(served[-1], Outcome.COMPLETED, usage), after_s=0.01))
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


# -- window of a per-minute limit: exact for every minute, for any arrivals -------------------------------

LIMIT = 10


@given(
    st.lists(
        st.tuples(
            st.floats(0, 25),
            # How long ago the amount was used, and the part of it that is returned.
            st.sampled_from([0.0, 0.0, 0.5, 12.0, 61.0, 75.0]),
            st.integers(1, LIMIT),
            st.integers(0, LIMIT),
        ),
        max_size=30,
    )
)
def test_a_window_counts_each_amount_for_the_minute_after_its_second(
    steps: list[tuple[float, float, int, int]],
) -> None:
    window, now = MinuteWindow(), 0.0
    amounts: dict[int, int] = {}

    def used_at(time: float) -> int:
        return sum(amount for second, amount in amounts.items() if second + 61 > time)

    for pause_s, age_s, amount, returned in steps:
        now += pause_s
        used = [second for second, amount in amounts.items() if amount and second + 61 > now]
        reset_s = max(used) + 61.0 - now if used else 0.0
        assert window.status(LIMIT, now) == LimitStatus(LIMIT, max(0, LIMIT - used_at(now)), reset_s)
        now += pause_s
        ends = [now, *(second + 61.0 for second in sorted(amounts) if second + 61 > now)]
        fitting = [end - now for end in ends if used_at(end) + amount <= LIMIT]
        assert window.admits_in_s(amount, LIMIT, now) == min(fitting, default=math.inf)
        at, second = now - age_s, math.floor(now - age_s)
        window.add(at, amount, now)
        window.subtract(at, min(amount, returned))
        amounts[second] = amounts.get(second, 0) + amount - min(amount, returned)
        assert window.used == used_at(now)


def test_a_refunded_amount_does_not_delay_the_reset() -> None:
    window = MinuteWindow()
    window.add(0.0, 5, 0.0)
    window.add(30.0, 5, 30.0)
    window.subtract(30.0, 5)
    assert window.status(LIMIT, 31.0) == LimitStatus(LIMIT, 5, 30.0)


@given(st.lists(st.tuples(st.floats(0, 25), st.integers(1, LIMIT)), min_size=1, max_size=60))
def test_no_minute_ever_admits_more_than_the_limit(steps: list[tuple[float, int]]) -> None:
    window = MinuteWindow()
    now = 0.0
    admitted: list[tuple[float, int]] = []
    for pause_s, amount in steps:
        now += pause_s
        for _ in range(2):
            # A sum of floats may be one ulp too small.
            now += window.admits_in_s(amount, LIMIT, now)
        admitted.append((now, amount))
        window.add(now, amount, now)
        for end, _ in admitted:
            assert sum(some for at, some in admitted if end - 60 < at <= end) <= LIMIT


# -- budget per hour of a model whose tokens are paid -----------------------------------------------------

PRICE = TokenPrices(prompt=1_000_000.0, generated=10_000_000.0, cached=0.0)


def paid(per_hour: float = 100.0) -> ManualDriver:
    """Return one replica whose prompt tokens cost 1 and whose output tokens cost 10."""
    return one_replica("s1", price=PRICE, budget_per_hour=per_hour)


def spend(driver: ManualDriver, request_id: str, output_tokens: int) -> None:
    driver.arrive(request_id)
    # Cached prompts cost nothing here; a server that counts no prompt does not count.
    usage = Usage(prompt_tokens=40, output_tokens=output_tokens, cached_tokens=40)
    driver.feed(Finished(request_id, Outcome.COMPLETED, usage))


def test_prices_are_per_million_and_cached_tokens_may_cost_less() -> None:
    usage = Usage(prompt_tokens=3_000, output_tokens=500, cached_tokens=1_000)
    assert TokenPrices(prompt=2.0, generated=8.0).of(usage) == pytest.approx(0.006 + 0.004)
    assert TokenPrices(prompt=2.0, generated=8.0, cached=0.5).of(usage) == pytest.approx(0.0045 + 0.004)


def test_a_spent_budget_rejects_until_its_oldest_part_is_an_hour_old() -> None:
    driver = paid()
    spend(driver, "a", 2)
    spend(driver, "a again", 4)
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
