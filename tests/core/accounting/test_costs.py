"""Engine time charged to requests; `tests/properties` checks its sum."""

import pytest

from serve_app.core import events as ev
from serve_app.core.accounting import costs
from serve_app.core.accounting.costs import OTHERS, TenantTotals
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.routing import prefill_cost
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from tests.builders import ManualDriver, one_replica, request


@pytest.fixture(autouse=True)
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms to read the weights, 1 ms per prompt token; nearly all of the weight is on these."""
    for name, value in (("_PRIOR_BASE_S", 0.01), ("_PRIOR_PER_TOKEN_S", 0.001), ("_PRIOR_WEIGHT", 1e9)):
        monkeypatch.setattr(prefill_cost, name, value)


def steady() -> ManualDriver:
    return one_replica(backpressure=BackpressureSettings(report_limit_s=1_000.0))


def used(driver: ManualDriver) -> dict[str, float]:
    totals = driver.scheduler.in_flight.engine_time.used
    return {tenant: seconds for (_, _, tenant), seconds in totals.items()}


def finish(driver: ManualDriver, request_id: str, *, after_s: float = 0.0) -> None:
    usage = Usage(prompt_tokens=50, output_tokens=5)
    driver.feed(ev.Finished(request_id, Outcome.COMPLETED, usage), after_s=after_s)


def start_answer(driver: ManualDriver, name: str, **fields: object) -> None:
    """Start a request whose prompt costs nothing beyond a step and whose answer begins at once."""
    driver.arrive(name, tenant=name, prompt_tokens=1, **fields)
    driver.feed(ev.FirstToken(name))


def test_a_single_request_gets_all_engine_time() -> None:
    driver = steady()
    start_answer(driver, "alone")
    finish(driver, "alone", after_s=2.0)

    assert used(driver) == {"alone": pytest.approx(2.0)}


def test_concurrent_answers_share_engine_time_equally() -> None:
    driver = steady()
    start_answer(driver, "first")
    driver.feed(ev.Woke(), after_s=1.0)
    start_answer(driver, "second")
    finish(driver, "first", after_s=2.0)
    finish(driver, "second", after_s=3.0)

    assert used(driver) == {"first": pytest.approx(1.0 + 1.0), "second": pytest.approx(1.0 + 3.0)}


def test_a_long_prompt_is_charged_what_it_adds_to_the_step() -> None:
    driver = steady()
    start_answer(driver, "answer")
    driver.arrive("prompt", tenant="prompt", prompt_tokens=510)
    # It costs 0.51 s, of which 0.01 s, one reading of the weights, would have passed without it.
    driver.feed(ev.FirstToken("prompt"), after_s=0.7)
    finish(driver, "prompt")
    finish(driver, "answer")

    assert used(driver) == {"prompt": pytest.approx(0.5 + 0.1), "answer": pytest.approx(0.1)}


def test_concurrent_prefills_share_the_token_budget_of_a_step() -> None:
    driver = steady()
    for name in ("one", "other"):
        driver.arrive(name, tenant=name, prompt_tokens=510)
    driver.feed(ev.FirstToken("one"), after_s=2.0)

    finish(driver, "one")

    # Two requests ran at its first token, one at its arrival: its share of a reading is 10 ms / 1.5. The
    # expected need of both is charged to them, and the rest of the two seconds is shared.
    shared_s = 2.0 - (0.51 - 0.01) - (0.51 - 0.01 / 2)
    assert used(driver) == {"one": pytest.approx(0.51 - 0.01 / 1.5 + shared_s / 2)}


def test_a_prompt_is_charged_at_most_the_elapsed_time() -> None:
    driver = steady()
    start_answer(driver, "answer")
    driver.arrive("prompt", tenant="prompt", prompt_tokens=510)
    driver.feed(ev.FirstToken("prompt"), after_s=0.2)
    finish(driver, "prompt")

    assert used(driver) == {"prompt": pytest.approx(0.2)}


def test_a_non_streamed_answer_is_charged_its_prompt_at_its_end() -> None:
    driver = steady()
    start_answer(driver, "answer")
    driver.arrive("whole", tenant="whole", prompt_tokens=510, streamed=False)
    finish(driver, "whole", after_s=0.7)
    finish(driver, "answer")

    assert used(driver) == {"whole": pytest.approx(0.5 + 0.1), "answer": pytest.approx(0.1)}


def test_a_request_rejected_by_its_engine_is_not_charged_its_prompt() -> None:
    driver = steady()
    start_answer(driver, "answer")
    driver.arrive("rejected", tenant="rejected", prompt_tokens=510)
    failure = ev.DispatchFailed("rejected", "r1", ev.DispatchFailure.UNREACHABLE)
    driver.feed(failure, after_s=0.2)

    assert used(driver).get("rejected", 0.0) <= 0.1
    finish(driver, "answer")
    assert sum(used(driver).values()) == pytest.approx(0.2)


def test_time_is_charged_by_pool_and_class() -> None:
    driver = steady()
    start_answer(driver, "mine", priority=PriorityClass.INTERACTIVE)
    finish(driver, "mine", after_s=1.0)

    assert [row[:3] for row in driver.scheduler.in_flight.engine_time.used] == [
        ("only", PriorityClass.INTERACTIVE, "mine")
    ]


def test_a_resumed_request_is_charged_from_its_resumption() -> None:
    driver = steady()
    driver.arrive("known", tenant="known", prompt_tokens=1)
    driver.feed(ev.FirstToken("known"))
    known = driver.find("known").request
    later = steady()
    later.feed(ev.Resumed(known, "r1", started=True))
    finish(later, "known", after_s=0.5)

    assert used(later) == {"known": pytest.approx(0.5)}


@pytest.mark.parametrize("tenants", [3, 100])
def test_further_tenants_are_summed_together(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_MAX_TENANTS", 2)
    totals = TenantTotals()
    totals.add("short", request("idle", tenant="idle"), 0.0)
    for number in (*range(tenants), 0):
        totals.add("short", request(f"r{number}", tenant=f"t{number}"), 1.0)

    found = {tenant: seconds for (_, _, tenant), seconds in totals.items()}
    assert found == {"t0": 2.0, "t1": 1.0, OTHERS: tenants - 2.0}
