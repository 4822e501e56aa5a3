"""Tuning loop as a state machine: observations in, orders and searches out."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.tuning.digital_twin import CalibrationSettings
from serve_app.tuning.engine_fit import EngineFitTask
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.parameter_loop import ParameterLoop, SearchTask, carry_out
from serve_app.tuning.rollout import DecisionKind, Observation, Retune
from serve_app.tuning.settings import ParameterTuningSettings
from serve_app.tuning.strategic_loop import PAPER
from serve_app.tuning.study import Finding, RolloutSettings
from tests.builders import spec
from tests.core.metrics.builders import record
from tests.tuning.rewards import found as found_values

TARGET = "backpressure.target_waiting"
CONFIGURED = SchedulerSettings(model="m", routing=RoutingSettings(pools=("only",)))
SETTINGS = ParameterTuningSettings(
    profile="laptop",
    every_s=50.0,
    min_requests=20,
    objective=ObjectiveSettings(min_requests=5),
    # The scripted latencies fit no engine, so the twin would fail its check.
    calibration=CalibrationSettings(check_requests=1_000_000),
    rollout=RolloutSettings(mode="on", slice_s=10.0, settle_s=0.0, pairs=4, cool_down_s=20.0),
)
REPLICA = spec("r1", "only")


def arrived(second: float, ttft_s: float = 0.2) -> RequestRecord:
    first = second + ttft_s
    return record(
        request_id=f"r{second}",
        arrived_at=second,
        dispatched_at=second,
        first_token_at=first,
        finished_at=first + 0.5,
        replica="r1",
    )


def observation(at: float, records: list[RequestRecord] | None = None, **changes: Any) -> Observation:
    usual = {"incarnation": 1, "lengths": [], "completed_until": at, "replicas": [REPLICA]}
    return Observation(at=at, outcomes=msgspec.msgpack.encode(records or []), **{**usual, **changes})


def watched(until: int = 40, settings: ParameterTuningSettings = SETTINGS) -> ParameterLoop:
    """Return a loop that has observed one request per second."""
    loop = ParameterLoop(CONFIGURED, settings, 0.0)
    for second in range(until):
        assert loop.observe(observation(second + 1.0, [arrived(second)])) == []
    return loop


def test_the_twin_learns_queues_as_the_application_does() -> None:
    loop = ParameterLoop(CONFIGURED, SETTINGS, 0.0, PAPER)
    for second in range(20):
        loop.observe(observation(second + 1.0, [arrived(second)]))
    task = loop.work_due(observation(20.0))
    assert isinstance(task, SearchTask)
    assert task.plan.tunable.refine_and_prune == PAPER


def found(target_waiting: int, *, confident: bool = True) -> Finding:
    current = ParameterLoop(CONFIGURED, SETTINGS, 0.0).rollout.incumbent
    return found_values({**current, "target_waiting": target_waiting}, confident=confident)


def test_a_search_needs_traffic_replicas_and_leave() -> None:
    loop = watched(19)
    assert loop.work_due(observation(19.0)) is None
    loop.observe(observation(20.0, [arrived(19.0)]))
    assert loop.work_due(observation(20.0, replicas=[])) is None
    task = loop.work_due(observation(20.0))
    assert isinstance(task, SearchTask)
    assert len(task.plan.traffic.requests) == 20
    assert [plan.replica_id for plan in task.plan.engines] == ["r1"]
    # One search at a time.
    assert loop.document()["state"] == "searching"
    assert loop.work_due(observation(21.0)) is None
    frozen = watched(20)
    frozen.observe(observation(20.0, frozen="an incident"))
    assert frozen.work_due(observation(20.0)) is None


def searched_again_at(loop: ParameterLoop, since: float) -> float:
    """Return when the next search is due, with one request per second."""
    at = since
    while loop.work_due(observation(at)) is None:
        at += 1.0
        loop.observe(observation(at, [arrived(at - 1.0)]))
    return at


def test_the_next_search_follows_a_pause() -> None:
    loop = watched()
    assert loop.work_due(observation(40.0)) is not None
    loop.finish(None, 45.0)
    assert loop.document()["state"] == "idle"
    # Without new traffic there is nothing new to find.
    assert loop.work_due(observation(500.0)) is None
    assert searched_again_at(loop, 45.0) == 95.0


def test_searches_that_find_nothing_become_rarer_until_one_finds_something() -> None:
    advises = replace(SETTINGS, rollout=replace(SETTINGS.rollout, mode="advise"))
    loop, at, rests = watched(settings=advises), 40.0, []
    assert loop.work_due(observation(at)) is not None
    for confident in (False, False, False, True):
        loop.finish(found(6, confident=confident), at)
        again = searched_again_at(loop, at)
        rests.append(again - at)
        at = again
    assert rests == [100.0, 200.0, 200.0, 50.0]
    assert loop.rollout.decisions == {DecisionKind.ADVISED: 1}


def test_after_work_it_rests_until_its_share_of_a_core_is_kept() -> None:
    loop = watched(settings=replace(SETTINGS, every_s=1.0, min_requests=1, core_share=0.02))
    assert loop.work_due(observation(40.0)) is not None
    # Two CPU seconds are 2 % of a hundred seconds since the work began.
    loop.finish(None, 48.0, cpu_s=2.0)
    assert searched_again_at(loop, 48.0) == 140.0


def test_work_is_done_faster_than_its_share_of_a_core() -> None:
    assert replace(SETTINGS, core_share=0.02).burst_share == 0.25
    assert replace(SETTINGS, core_share=0.6).burst_share == 0.6


def test_nothing_is_searched_for_while_the_twin_is_not_known() -> None:
    loop = watched(settings=replace(SETTINGS, profile=None))
    assert loop.work_due(observation(40.0)) is None
    assert loop.document()["state"] == "idle: the twin is fitted after 200 streamed responses (40 so far)"
    assert loop.document()["twin"]["step_times"] == "unknown"


def test_a_search_result_is_tried_in_slices_and_adopted_permanently() -> None:
    loop = watched()
    loop.work_due(observation(40.0))
    assert loop.finish(found(6), 40.0) == []
    orders: list[Retune] = []
    for second in range(40, 126):
        is_candidate = bool(orders) and orders[-1].values[TARGET] == 6
        orders += loop.observe(observation(second + 1.0, [arrived(second, 0.05 if is_candidate else 0.2)]))
    assert [order.values[TARGET] for order in orders] == [6, 6, 3, 6, 6, 3, 6]
    assert [order.valid_s for order in orders] == [15.0, 15.0, None, 15.0, 15.0, None, None]
    assert loop.rollout.audit[-1].kind is DecisionKind.ADOPTED
    assert loop.document()["studies"][0]["gain"] == 0.1
    # No search begins before the cool-down is over.
    assert loop.work_due(observation(135.0)) is None
    task = loop.work_due(observation(150.0))
    assert isinstance(task, SearchTask)
    assert task.plan.space.current["target_waiting"] == 6


def test_the_engines_are_fitted_before_anything_is_searched_for() -> None:
    loop = watched(60, replace(SETTINGS, profile=None, calibration=CalibrationSettings(first_requests=50)))
    task = loop.work_due(observation(60.0))
    assert isinstance(task, EngineFitTask)
    loop.finish(carry_out(task, clock=lambda: 0.0), 61.0)
    assert loop.document()["twin"]["step_times"] == "fitted to the engines (once)"
    assert "the error of the twin is measured after" in loop.document()["state"]


def test_a_new_scheduler_gets_the_permanent_values() -> None:
    loop = watched()
    loop.rollout.incumbent = {**loop.rollout.incumbent, "target_waiting": 5}
    (order,) = loop.begin(CONFIGURED, 3.0)
    assert (order.values[TARGET], order.valid_s) == (5, None)
    # Its clock is another one, and none of the old traffic counts.
    assert loop.work_due(observation(4.0)) is None


def test_a_restarted_loop_has_the_tried_candidates() -> None:
    loop = watched()
    loop.work_due(observation(40.0))
    loop.finish(found(6), 41.0)
    state = json.loads(json.dumps(loop.state()))
    again = ParameterLoop(CONFIGURED, SETTINGS, 0.0)
    (order,) = again.begin(CONFIGURED, 0.0, state)
    assert order.values[TARGET] == 3
    assert again.rollout.audit[-1].kind is DecisionKind.ROLLED_BACK
    assert again.document()["studies"] == loop.document()["studies"]


def test_a_broken_state_is_rejected_and_the_loop_begins_without() -> None:
    again = ParameterLoop(CONFIGURED, SETTINGS, 0.0)
    with pytest.raises(ValueError, match="learned state"):
        again.begin(CONFIGURED, 0.0, {"rollout": {"version": 99}, "studies": []})
    assert again.rollout.incumbent["target_waiting"] == 3
