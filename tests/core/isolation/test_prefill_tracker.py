"""Prefill costs learned from first tokens, by pool."""

from serve_app.core.events import Finished, FirstToken
from serve_app.errors import Outcome
from tests.builders import ManualDriver, dispatched, two_pools


def prefill(driver: ManualDriver, request_id: str, prompt_tokens: int, seconds: float) -> str:
    """Run a request alone on its replica; return the replica."""
    ((_, replica_id),) = dispatched(
        driver.arrive(request_id, prompt_tokens=prompt_tokens, max_output_tokens=10)
    )
    driver.feed(FirstToken(request_id), after_s=seconds)
    driver.feed(Finished(request_id, Outcome.COMPLETED))
    driver.report(replica_id)
    return replica_id


def test_the_cost_of_a_prefill_is_learned_for_its_pool() -> None:
    driver = two_pools()
    for number in range(200):
        short, long = 100 + number, 1_100 + 10 * number
        assert prefill(driver, f"s{number}", short, 2e-3 * short) == "s1"
        assert prefill(driver, f"l{number}", long, 2e-5 * long) == "l1"
    costs = driver.scheduler.prefill_costs
    # Ten times the tokens take less time there.
    assert costs.of("long").seconds(1_500) < costs.of("short").seconds(150) / 2
