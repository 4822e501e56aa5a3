"""Scheduling in front of engines that report neither load nor limits."""

from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished, FirstToken
from serve_app.core.isolation import IsolationSettings
from serve_app.errors import Outcome
from tests.builders import ManualDriver, dispatched, one_replica

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
    assert (state.max_num_seqs, state.in_flight, state.suspended) == (4, 4, False)
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
    driver.scheduler.ledger["r1"].interference.is_shown = True
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
