from dataclasses import replace
from typing import Any

import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Finished, FirstToken, Retuned
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.delay_bound import DelayBoundSettings
from serve_app.core.settings import EwsjfSettings, ScoreWeights
from serve_app.errors import Outcome
from tests.builders import ManualDriver, dispatched, one_replica


def make_driver(policy: str = "ewsjf", **changes: Any) -> ManualDriver:
    return one_replica(limits={"kv_tokens": 20_000, "max_model_len": 8_000}, policy=policy, **changes)


def retune(driver: ManualDriver, **changes: Any) -> list[Command]:
    return driver.feed(Retuned(replace(driver.scheduler.settings, **changes)))


def test_a_higher_target_sends_more_at_once() -> None:
    driver = make_driver(backpressure=BackpressureSettings(target_waiting=1))
    assert [bool(driver.arrive(f"r{n}")) for n in range(3)] == [True, False, False]
    sent = retune(driver, backpressure=BackpressureSettings(target_waiting=2))
    assert dispatched(sent) == [("r1", "r1")]


def test_a_higher_limit_dispatches_more_long_prefills_at_once() -> None:
    isolation = IsolationSettings(prior_boundary_tokens=300, max_long_prefills=1)
    driver = make_driver(isolation=isolation)
    driver.arrive("long1", prompt_tokens=500)
    assert driver.arrive("long2", prompt_tokens=500) == []
    assert dispatched(retune(driver, isolation=replace(isolation, max_long_prefills=2))) == [("long2", "r1")]


def test_boundaries_follow_other_shares_of_the_learned_lengths() -> None:
    driver = make_driver()
    for number in range(300):
        driver.arrive(f"r{number}", prompt_tokens=50 + 10 * (number % 60))
        driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED))
    before = driver.scheduler.isolation.boundary_tokens
    retune(driver, isolation=IsolationSettings(short_work_share=0.45))
    assert driver.scheduler.isolation.boundary_tokens > before


def test_other_weights_change_the_order_and_lose_no_request() -> None:
    def order(weights: ScoreWeights) -> list[str]:
        driver = make_driver(backpressure=BackpressureSettings(target_waiting=1))
        driver.arrive("running")
        driver.arrive("old long", prompt_tokens=900)
        driver.now += 1.5
        driver.arrive("new short", prompt_tokens=20)
        retune(driver, ewsjf=EwsjfSettings(weights=weights))
        served = [driver.feed(FirstToken("running"))]
        served.append(driver.feed(FirstToken(dispatched(served[0])[0][0])))
        return [dispatched(commands)[0][0] for commands in served]

    assert order(ScoreWeights(a_u=0.0, b_u=0.01)) == ["new short", "old long"]
    assert order(ScoreWeights(a_u=1.0, b_u=5.0)) == ["old long", "new short"]


def test_a_tighter_bound_on_delay_lets_a_waiting_long_prompt_go_first() -> None:
    def next_after_retuning(wait_ratio: float) -> str:
        driver = make_driver(
            backpressure=BackpressureSettings(target_waiting=1),
            isolation=IsolationSettings(prior_boundary_tokens=100),
            ewsjf=EwsjfSettings(weights=ScoreWeights(a_u=0.0, b_u=0.01)),
            delay_bound=DelayBoundSettings(wait_ratio=8.0),
        )
        driver.arrive("running")
        driver.arrive("longest", prompt_tokens=900)
        for number in range(6):
            driver.now += 0.1
            driver.arrive(f"long{number}", prompt_tokens=500)
        sent = dispatched(driver.feed(FirstToken("running")))
        assert sent == [("long0", "r1"), ("long1", "r1")]
        driver.now += 0.1
        retune(driver, delay_bound=DelayBoundSettings(wait_ratio=wait_ratio))
        next_sent = driver.feed(FirstToken("long0")) + driver.feed(FirstToken("long1"))
        return dispatched(next_sent)[0][0]

    assert next_after_retuning(8.0) == "long2"
    assert next_after_retuning(1.0) == "longest"


def test_settings_that_are_built_into_queues_cannot_change() -> None:
    driver = make_driver()
    current: SchedulerSettings = driver.scheduler.settings
    with pytest.raises(ValueError, match="policy cannot change in a running scheduler"):
        driver.feed(Retuned(replace(current, policy="fcfs")))
    with pytest.raises(ValueError, match="isolation"):
        driver.feed(Retuned(replace(current, isolation=replace(current.isolation, max_long_prefills=0))))
    with pytest.raises(ValueError, match="backpressure"):
        driver.feed(Retuned(replace(current, backpressure=BackpressureSettings(report_limit_s=9.0))))
    assert driver.scheduler.settings == current
