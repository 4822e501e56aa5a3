"""The budget per hour of a model whose tokens are paid."""

import pytest

from serve_app.core.admission.key_limits import Spending, TokenPrices
from serve_app.core.events import Cancelled, DispatchFailed, DispatchFailure, Finished
from serve_app.core.learned_state import learned_state, restore_state
from serve_app.core.scheduler import Scheduler
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.settings.application import settings_of
from tests.builders import ManualDriver, dispatched, one_replica, only_conclusion

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


@pytest.mark.parametrize("state", [[[1.0, 5.0], [9.0, 5.0]], [[-1.0, 5.0]], [[1.0, -5.0]]])
def test_an_impossible_state_is_rejected(state: list[list[float]]) -> None:
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
