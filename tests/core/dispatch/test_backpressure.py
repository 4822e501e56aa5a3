"""Backpressure of engines, with and without load reports."""

from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, FirstToken, ReplicaJoined, Woke
from serve_app.core.isolation import IsolationSettings
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


@pytest.mark.parametrize(
    ("gates", "reports", "accepts"),
    [
        ({"tpot_gate_s": 0.15}, [{"running": 5, "tpot_s": 0.4}], False),
        ({"kv_gate_ratio": 0.95}, [{"running": 5, "kv_usage_ratio": 0.96}], False),
        ({"kv_gate_ratio": 0.95}, [{"running": 5, "kv_usage_ratio": ratio} for ratio in (0.96, 0.9)], True),
        ({"tpot_gate_s": None}, [{"running": 5, "tpot_s": 9.0}], True),
        # An idle engine, and one that is slow with few requests.
        ({"tpot_gate_s": 0.15}, [{"running": 0, "tpot_s": 0.9, "kv_usage_ratio": 1.0}], True),
        ({"tpot_gate_s": 0.15}, [{"running": 1, "tpot_s": 0.3}] * 2, True),
        ({"tpot_gate_s": 0.15}, [{"running": 1, "tpot_s": 0.3}] * 2 + [{"running": 5, "tpot_s": 0.4}], False),
    ],
)
def test_a_slow_or_full_replica_receives_no_requests_unless_it_is_nearly_idle(
    gates: dict[str, Any], reports: list[dict[str, Any]], accepts: bool
) -> None:
    driver = make_driver(**gates)
    for load in reports:
        driver.report("r1", **load)
    assert bool(driver.arrive("a")) is accepts


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


# -- engines that report neither load nor limits ----------------------------------------------------------

SILENT: dict[str, Any] = {"received": None, "waiting": None, "running": None, "kv_usage_ratio": None}


def replica_without_load_reports(**limits: int | None) -> ManualDriver:
    """Return an engine without metrics and without limits other than those given."""
    unknown: dict[str, int | None] = {"kv_tokens": None, "max_num_seqs": None, "max_model_len": 100_000}
    driver = one_replica(limits={**unknown, **limits}, backpressure=BackpressureSettings(lag_factor=0.0))
    driver.report("r1", **SILENT)
    return driver


def sent(driver: ManualDriver, names: range, **fields: object) -> list[str]:
    """Return which of these requests are dispatched at once."""
    went: list[str] = []
    for name in names:
        went += [request_id for request_id, _ in dispatched(driver.arrive(f"q{name}", **fields))]
    return went


def test_a_burst_enters_an_unknown_engine_in_a_window_that_doubles_per_round_trip() -> None:
    driver = replica_without_load_reports()
    sizes, names = [], sent(driver, range(400))
    while names:
        sizes.append(len(names))
        names = start_all(driver, names)
    assert sizes[0] == 32
    assert sizes[1] > 1.4 * sizes[0]


def start_all(driver: ManualDriver, names: list[str], after_s: float = 0.01) -> list[str]:
    """Start these answers at the same time, and return what is dispatched then."""
    driver.now += after_s
    return [one for name in names for one, _ in dispatched(driver.feed(FirstToken(name)))]


def test_a_replica_that_rejoins_forgets_what_was_learned() -> None:
    driver = replica_without_load_reports()
    driver.arrive("a")
    driver.arrive("b")
    driver.feed(DispatchFailed("b", "r1", DispatchFailure.BUSY))
    state = driver.scheduler.ledger["r1"]
    assert state.max_num_seqs == 1
    driver.join("r1", "only", kv_tokens=None, max_num_seqs=None)
    driver.report("r1", **SILENT)
    assert state.max_num_seqs is None


def test_a_configured_limit_replaces_a_learned_one() -> None:
    driver = replica_without_load_reports()
    assert len(sent(driver, range(3))) == 3
    driver.feed(DispatchFailed("q2", "r1", DispatchFailure.BUSY))
    driver.join("r1", "only", kv_tokens=None, max_num_seqs=6)
    driver.report("r1", **SILENT)
    sent(driver, range(3, 20))
    state = driver.scheduler.ledger["r1"]
    assert (state.max_num_seqs, state.in_flight) == (6, 6)


def test_a_known_batch_is_the_limit_of_an_engine_without_load_reports() -> None:
    # A request beyond the four slots would wait in the engine, where nothing shows it.
    assert len(sent(replica_without_load_reports(max_num_seqs=4), range(30))) == 4


def test_a_rejection_for_lack_of_capacity_is_the_limit_and_closes_nothing() -> None:
    driver = replica_without_load_reports()
    assert len(sent(driver, range(6))) == 6
    for name in ("q4", "q5"):
        driver.feed(DispatchFailed(name, "r1", DispatchFailure.BUSY, retry_after_s=5.0))
    state = driver.scheduler.ledger["r1"]
    assert (state.max_num_seqs, state.in_flight, state.suspension.active) == (4, 4, False)
    driver.now += 1.0
    # The first that was put back follows as soon as another ends.
    assert [one for one, _ in dispatched(driver.feed(Finished("q0", Outcome.COMPLETED)))] == ["q4"]


def test_a_rejection_within_the_limit_pauses_the_engine_as_long_as_it_asks() -> None:
    driver = replica_without_load_reports(max_num_seqs=10)
    sent(driver, range(2))
    driver.feed(DispatchFailed("q1", "r1", DispatchFailure.BUSY, retry_after_s=3.0))
    driver.report("r1", after_s=2.0, **SILENT)
    assert driver.find("q1").queued
    assert dispatched(driver.report("r1", after_s=1.5, **SILENT)) == [("q1", "r1")]


def test_a_pause_that_an_engine_asks_for_is_bounded() -> None:
    driver = replica_without_load_reports(max_num_seqs=10)
    sent(driver, range(1))
    driver.feed(DispatchFailed("q0", "r1", DispatchFailure.BUSY, retry_after_s=3_600.0))
    assert dispatched(driver.report("r1", after_s=21.0, **SILENT)) == [("q0", "r1")]


def isolating() -> ManualDriver:
    """Return an engine without metrics, with a short request, behind a scheduler that isolates long ones."""
    limits = {"kv_tokens": None, "max_num_seqs": 100, "max_model_len": 100_000}
    isolation = IsolationSettings(prior_boundary_tokens=300, max_long_prefills=1, no_short_s=1e6)
    driver = one_replica(limits=limits, policy="fcfs-isolated", isolation=isolation)
    driver.report("r1", **SILENT)
    assert sent(driver, range(1)) == ["q0"]
    return driver


def test_a_long_prompt_waits_for_no_other_on_an_engine_that_showed_no_interference() -> None:
    driver = isolating()
    assert len(sent(driver, range(1, 9), prompt_tokens=2_000)) == 8


def test_long_prefills_are_isolated_on_an_engine_that_showed_interference() -> None:
    driver = isolating()
    driver.scheduler.ledger["r1"].learned.interference.is_shown = True
    assert sent(driver, range(1, 9), prompt_tokens=2_000) == ["q1"]


def test_an_engine_that_reports_its_queue_is_known_to_compute_prefills_in_its_batch() -> None:
    driver = isolating()
    driver.report("r1", received=1, waiting=0, running=1, kv_usage_ratio=0.0)
    assert sent(driver, range(1, 9), prompt_tokens=2_000) == ["q1"]


def test_an_unknown_cache_is_no_limit() -> None:
    driver = replica_without_load_reports(max_num_seqs=4)
    assert dispatched(driver.arrive("huge", prompt_tokens=30_000)) == [("huge", "r1")]
    assert driver.scheduler.ledger["r1"].free_tokens > 1 << 39


@pytest.mark.parametrize("waiting", [0, 3])
def test_an_engine_that_reports_its_queue_needs_no_adaptive_limits(waiting: int) -> None:
    driver = replica_without_load_reports()
    driver.report("r1", received=0, waiting=waiting, running=5, kv_usage_ratio=0.1)
    state = driver.scheduler.ledger["r1"]
    assert state.learned_limit is None
    assert state.max_num_seqs is None


def test_the_batch_of_an_engine_with_load_reports_is_learned_from_its_plateau() -> None:
    driver = replica_without_load_reports()
    for _ in range(5):
        driver.report("r1", after_s=0.2, received=0, waiting=2, running=6, kv_usage_ratio=0.1)
    assert driver.scheduler.ledger["r1"].max_num_seqs == 6
    driver.join("r1", "only", kv_tokens=None, max_num_seqs=None)
    assert driver.scheduler.ledger["r1"].max_num_seqs is None


def test_an_engine_without_load_reports_is_not_gated() -> None:
    driver = replica_without_load_reports()
    assert sent(driver, range(1)) == ["q0"]
    driver.report("r1", after_s=0.2, **SILENT)
    assert not driver.scheduler.ledger["r1"].gated


def test_a_no_wait_request_goes_only_to_an_engine_that_begins_it_at_once() -> None:
    driver = replica_without_load_reports(max_num_seqs=2)
    assert len(sent(driver, range(3), no_wait=True)) == 2
    # With reports, others may wait in the engine, in a small queue; it may not.
    driver = replica_without_load_reports(max_num_seqs=2)
    driver.report("r1", received=0, waiting=0, running=0, kv_usage_ratio=0.0)
    assert sent(driver, range(3)) == ["q0", "q1", "q2"]
    assert sent(driver, range(3, 4), no_wait=True) == []
    # A request of another gateway that waits in the engine precedes it.
    driver = replica_without_load_reports(max_num_seqs=10)
    driver.report("r1", received=1, waiting=1, running=1, kv_usage_ratio=0.0)
    assert sent(driver, range(1), no_wait=True) == []
    assert sent(driver, range(1, 2)) == ["q1"]
