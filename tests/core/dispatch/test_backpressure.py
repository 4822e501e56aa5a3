from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Finished, FirstToken, ReplicaJoined, Woke
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched, one_replica, spec


def make_driver(**changes: Any) -> ManualDriver:
    backpressure = BackpressureSettings(**{"lag_factor": 0.0, **changes})
    return one_replica(limits={"kv_tokens": 500_000, "max_model_len": 100_000}, backpressure=backpressure)


def test_a_slow_replica_receives_no_requests_until_it_has_clearly_recovered() -> None:
    driver = make_driver(tpot_gate_s=0.15)
    driver.report("r1", running=1, tpot_s=0.05)
    driver.report("r1", running=5, tpot_s=0.16)
    assert driver.arrive("a") == []
    driver.report("r1", running=5, tpot_s=0.14)
    assert driver.find("a").queued
    assert dispatched(driver.report("r1", running=5, tpot_s=0.13)) == [("a", "r1")]
    driver.report("r1", running=5, tpot_s=0.14)
    assert dispatched(driver.arrive("b")) == [("b", "r1")]


def test_an_idle_engine_is_never_gated() -> None:
    driver = make_driver(tpot_gate_s=0.15)
    driver.report("r1", running=0, tpot_s=0.9, kv_usage_ratio=1.0)
    assert dispatched(driver.arrive("a")) == [("a", "r1")]


def test_without_a_gate_a_slow_replica_receives_requests() -> None:
    driver = make_driver(tpot_gate_s=None)
    driver.report("r1", running=5, tpot_s=9.0)
    assert dispatched(driver.arrive("a")) == [("a", "r1")]


def test_a_replica_with_a_nearly_full_cache_receives_no_requests() -> None:
    driver = make_driver(kv_gate_ratio=0.95)
    driver.report("r1", running=5, kv_usage_ratio=0.96)
    assert driver.arrive("a") == []
    assert dispatched(driver.report("r1", running=5, kv_usage_ratio=0.9)) == [("a", "r1")]


def test_prefill_work_in_flight_counts_though_the_cache_is_nearly_empty() -> None:
    driver = make_driver(max_prefill_backlog_s=4.0)
    # Six seconds at the prior of 0.1 ms per token.
    assert dispatched(driver.arrive("huge", prompt_tokens=60_000)) == [("huge", "r1")]
    assert driver.arrive("small") == []
    assert dispatched(driver.feed(FirstToken("huge"))) == [("small", "r1")]


@pytest.mark.parametrize(("chunk_tokens", "passes"), [(256, True), (0, False)])
def test_short_requests_pass_a_long_prefill_that_the_engine_computes_in_chunks(
    chunk_tokens: int, passes: bool
) -> None:
    backpressure = BackpressureSettings(max_prefill_backlog_s=4.0)
    driver = ManualDriver(routing=ONE_POOL, policy="ewsjf", backpressure=backpressure)
    known = spec("r1", "only", kv_tokens=500_000, max_model_len=100_000)
    driver.feed(ReplicaJoined(replace(known, long_prefill_token_threshold=chunk_tokens)))
    driver.report("r1")
    # Six seconds at the prior of 0.1 ms per token.
    assert dispatched(driver.arrive("huge", prompt_tokens=60_000)) == [("huge", "r1")]
    assert bool(driver.arrive("small")) is passes


def test_unobserved_prefills_do_not_count_as_in_flight_until_the_answer_ends() -> None:
    driver = make_driver(max_prefill_backlog_s=4.0, target_waiting=1_000)
    driver.join("r1", "only", kv_tokens=500_000, max_model_len=100_000, max_num_seqs=500)
    # Twelve seconds of prefill in all, at 0.1 ms per token; the answers take longer than that.
    for number in range(200):
        driver.report("r1", after_s=0.3, received=number)
        assert dispatched(driver.arrive(f"r{number}", prompt_tokens=600, streamed=False))


def test_an_unobserved_prefill_of_a_huge_prompt_counts_for_its_usual_time() -> None:
    driver = make_driver(max_prefill_backlog_s=4.0)
    driver.arrive("huge", prompt_tokens=60_000, streamed=False)
    assert driver.arrive("small") == []
    for _ in range(6):
        assert driver.find("small").queued
        driver.report("r1", after_s=2.0, received=1)
    # Twice its usual six seconds.
    driver.feed(Woke(), after_s=0.1)
    assert not driver.find("small").queued


def test_prefill_costs_are_not_learned_from_non_streamed_answers() -> None:
    driver = make_driver()
    driver.arrive("r", prompt_tokens=100, streamed=False)
    driver.feed(FirstToken("r"), after_s=30.0)
    assert driver.scheduler.prefill_costs.shared.observations == 0


def stream(driver: ManualDriver, request_id: str, seconds: float, output_tokens: int = 3) -> None:
    """Stream an answer whose tokens after the first take this long in all."""
    assert dispatched(driver.arrive(request_id)) == [(request_id, "r1")]
    driver.feed(FirstToken(request_id))
    usage = Usage(prompt_tokens=40, output_tokens=output_tokens)
    driver.feed(Finished(request_id, Outcome.COMPLETED, usage), after_s=seconds)


def without_metrics(driver: ManualDriver) -> list[Command]:
    return driver.report("r1", received=None, waiting=None, running=None, kv_usage_ratio=None)


def test_an_engine_that_is_slow_with_few_requests_is_not_gated() -> None:
    driver = make_driver(tpot_gate_s=0.15)
    driver.report("r1", running=1, tpot_s=0.3)
    driver.report("r1", running=1, tpot_s=0.3)
    assert dispatched(driver.arrive("a")) == [("a", "r1")]
    driver.report("r1", running=5, tpot_s=0.4)
    assert driver.arrive("b") == []


def test_a_measured_pace_does_not_close_an_engine_that_reports_none() -> None:
    driver = make_driver(tpot_gate_s=0.15)
    for number in range(3):
        # 0.2 s per token: a slow client, or a provider far away.
        stream(driver, f"slow{number}", 0.4)
    assert dispatched(driver.arrive("runs")) == [("runs", "r1")]
    without_metrics(driver)
    assert driver.scheduler.ledger["r1"].report.tpot_s == 0.2  # type: ignore[union-attr]
    assert dispatched(driver.arrive("next")) == [("next", "r1")]


def test_a_measured_pace_is_forgotten_when_no_answer_has_ended_for_long() -> None:
    driver = make_driver(tpot_gate_s=0.15)
    for number in range(3):
        stream(driver, f"slow{number}", 0.4)
    driver.now += 10.0
    without_metrics(driver)
    assert driver.scheduler.ledger["r1"].report.tpot_s is None  # type: ignore[union-attr]


def test_reported_load_counts_more_than_measured_load() -> None:
    driver = make_driver(tpot_gate_s=0.15)
    driver.report("r1", running=1, tpot_s=0.05)
    for number in range(3):
        stream(driver, f"slow{number}", 0.4)
    driver.arrive("runs")
    driver.report("r1", running=1, tpot_s=None)
    assert dispatched(driver.arrive("next")) == [("next", "r1")]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_faster_an_engine_serves_the_more_requests_are_sent_between_two_reports(streamed: bool) -> None:
    sent = {}
    for pace in (1, 10):
        driver = one_replica(
            limits={"max_num_seqs": 500}, backpressure=BackpressureSettings(target_waiting=3, lag_factor=2.0)
        )
        for number in range(100):
            if number % pace == 0:
                driver.report("r1", after_s=0.2, received=number)
            driver.arrive(f"r{number}", streamed=streamed)
            if streamed:
                driver.feed(FirstToken(f"r{number}"))
            driver.feed(Finished(f"r{number}", Outcome.COMPLETED))
        driver.report("r1", received=100)
        sent[pace] = sum(len(dispatched(driver.arrive(f"more{number}"))) for number in range(60))
    assert sent[1] == 3
    assert sent[10] > 6
