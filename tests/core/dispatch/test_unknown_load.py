"""Scheduling in front of engines that report neither load nor limits."""

from collections import deque
from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Finished, FirstToken
from serve_app.errors import Outcome
from serve_app.request import Usage
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


def test_an_engine_of_unknown_load_receives_three_requests_at_first() -> None:
    assert len(sent(replica_without_load_reports(), range(30))) == 3


def start_all(driver: ManualDriver, names: list[str], after_s: float = 0.01) -> list[str]:
    """Start these answers at the same time, and return what is dispatched then."""
    driver.now += after_s
    return [one for name in names for one, _ in dispatched(driver.feed(FirstToken(name)))]


def test_a_burst_fills_it_within_a_few_round_trips() -> None:
    driver = replica_without_load_reports()
    sizes, names = [], sent(driver, range(200))
    while names:
        sizes.append(len(names))
        names = start_all(driver, names)
    assert sizes[:5] == [3, 4, 6, 9, 14]


def test_a_full_batch_is_found_and_few_requests_wait_in_the_engine() -> None:
    driver = replica_without_load_reports()
    running, waiting = deque[str](), deque(sent(driver, range(200)))
    for _ in range(60):
        while waiting and len(running) < 4:
            running.append(waiting.popleft())
            waiting += start_all(driver, [running[-1]])
        driver.report("r1", after_s=1.0, **SILENT)
        end = Finished(
            running.popleft(), Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=50, cached_tokens=0)
        )
        waiting += [one for one, _ in dispatched(driver.feed(end))]
    assert driver.scheduler.ledger["r1"].max_num_seqs == 4
    # `target_waiting` beyond the batch, as for an engine that reports it.
    assert len(running) + len(waiting) == 4 + 3


def test_a_replica_that_rejoins_forgets_what_was_learned() -> None:
    driver = replica_without_load_reports()
    state = driver.scheduler.ledger["r1"]
    assert state.observed is not None
    state.observed.on_full(30, 5_000, 1.0)
    assert state.max_num_seqs == 30
    driver.join("r1", "only", kv_tokens=None, max_num_seqs=None)
    driver.report("r1", **SILENT)
    assert state.max_num_seqs is None


def test_a_learned_cache_limits_a_busy_engine_and_not_an_idle_one() -> None:
    driver = replica_without_load_reports()
    state = driver.scheduler.ledger["r1"]
    assert state.observed is not None
    for running in (30, 60):
        state.observed.on_full(running, 5_000, 0.0)
    assert dispatched(driver.arrive("huge", prompt_tokens=30_000)) == [("huge", "r1")]
    start_all(driver, ["huge"])
    assert state.kv_budget < 5_100
    assert dispatched(driver.arrive("next", prompt_tokens=30_000)) == []
    end = Finished("huge", Outcome.COMPLETED, Usage(prompt_tokens=30_000, output_tokens=50, cached_tokens=0))
    assert dispatched(driver.feed(end)) == [("next", "r1")]


def test_answers_that_are_not_streamed_move_their_limit_when_they_end() -> None:
    driver = replica_without_load_reports()
    first = sent(driver, range(60), streamed=False)
    assert len(first) == 8
    went = []
    driver.report("r1", after_s=0.5, **SILENT)
    for name in first:
        end = Finished(name, Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=50, cached_tokens=0))
        went += [request_id for request_id, _ in dispatched(driver.feed(end))]
    # Each one that ends makes room for two.
    assert len(went) == 2 * len(first)


def test_a_known_batch_is_the_limit_of_an_engine_without_load_reports() -> None:
    # Four slots, and `target_waiting` beyond them.
    assert len(sent(replica_without_load_reports(max_num_seqs=4), range(30))) == 4 + 3


def test_an_unknown_cache_is_no_limit() -> None:
    driver = replica_without_load_reports(max_num_seqs=4)
    assert dispatched(driver.arrive("huge", prompt_tokens=30_000)) == [("huge", "r1")]
    assert driver.scheduler.ledger["r1"].free_tokens > 1 << 39


@pytest.mark.parametrize("waiting", [0, 3])
def test_an_engine_that_reports_its_queue_needs_no_adaptive_limits(waiting: int) -> None:
    driver = replica_without_load_reports()
    driver.report("r1", received=0, waiting=waiting, running=5, kv_usage_ratio=0.1)
    state = driver.scheduler.ledger["r1"]
    assert state.adaptive_limits is None
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
