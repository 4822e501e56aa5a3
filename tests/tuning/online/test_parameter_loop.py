"""The tuning loop as a machine: observations go in, orders and searches come out."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serve_app.metrics.record import RequestRecord
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import SchedulerSettings
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.online.parameter_loop import Observation, ParameterLoop
from serve_app.tuning.online.parameter_search import ParameterTuningSettings, SearchResult, SearchTask
from serve_app.tuning.online.replay import replay
from serve_app.tuning.online.rollout_settings import Act, Retune, RolloutSettings
from serve_app.tuning.partition.settings import PAPER
from tests.builders import spec
from tests.metrics.builders import record
from tests.tuning.rewards import search_result

TARGET = "backpressure.target_waiting"
CONFIGURED = SchedulerSettings(model="m", routing=RoutingSettings(pools=("only",)))
SETTINGS = ParameterTuningSettings(
    profile="laptop",
    every_s=50.0,
    min_requests=20,
    objective=ObjectiveSettings(min_requests=5),
    rollout=RolloutSettings(
        mode="on", slice_s=10.0, settle_s=0.0, pairs=2, cool_down_s=20.0, control_variates=False
    ),
)
CONTROLLED = replace(SETTINGS, rollout=replace(SETTINGS.rollout, control_variates=True, judge_limit_s=30.0))
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
    usual = {"settled_until": at, "records": records or [], "replicas": [REPLICA]}
    return Observation(at=at, **{**usual, **changes})


def watched(until: int = 40, settings: ParameterTuningSettings = SETTINGS) -> ParameterLoop:
    """A loop that has observed a request a second."""
    loop = ParameterLoop(CONFIGURED, settings, 0.0)
    for second in range(until):
        assert loop.observe(observation(second + 1.0, [arrived(second)])) == []
    return loop


def test_the_twin_learns_queues_as_the_application_does() -> None:
    loop = ParameterLoop(CONFIGURED, SETTINGS, 0.0, PAPER)
    for second in range(20):
        loop.observe(observation(second + 1.0, [arrived(second)]))
    task = loop.search_due(observation(20.0))
    assert task is not None
    assert task.plan.tunable.refine_and_prune == PAPER


def found(target_waiting: int, *, confident: bool = True) -> SearchResult:
    current = ParameterLoop(CONFIGURED, SETTINGS, 0.0).rollout.incumbent
    return search_result({**current, "target_waiting": target_waiting}, confident=confident)


def test_a_search_needs_traffic_replicas_and_leave() -> None:
    loop = watched(19)
    assert loop.search_due(observation(19.0)) is None
    loop.observe(observation(20.0, [arrived(19.0)]))
    assert loop.search_due(observation(20.0, replicas=[])) is None
    task = loop.search_due(observation(20.0))
    assert isinstance(task, SearchTask)
    assert len(task.plan.traffic.requests) == 20
    assert [plan.replica_id for plan in task.plan.engines] == ["r1"]
    # One at a time.
    assert loop.is_searching
    assert loop.search_due(observation(21.0)) is None
    frozen = watched(20)
    frozen.observe(observation(20.0, frozen="an incident"))
    assert frozen.search_due(observation(20.0)) is None


def searched_again_at(loop: ParameterLoop, since: float) -> float:
    """When the next search is due, with a request in each second."""
    at = since
    while loop.search_due(observation(at)) is None:
        at += 1.0
        loop.observe(observation(at, [arrived(at - 1.0)]))
    return at


def test_the_next_search_comes_after_a_rest() -> None:
    loop = watched()
    assert loop.search_due(observation(40.0)) is not None
    loop.on_search_failure(45.0)
    assert not loop.is_searching
    # Without new traffic there is nothing new to find.
    assert loop.search_due(observation(500.0)) is None
    assert searched_again_at(loop, 45.0) == 95.0


def test_searches_that_find_nothing_become_rarer_until_one_finds_something() -> None:
    advises = replace(SETTINGS, rollout=replace(SETTINGS.rollout, mode="advise"))
    loop, at, rests = watched(settings=advises), 40.0, []
    assert loop.search_due(observation(at)) is not None
    for confident in (False, False, False, True):
        loop.on_search_result(found(6, confident=confident), at)
        again = searched_again_at(loop, at)
        rests.append(again - at)
        at = again
    assert rests == [100.0, 200.0, 200.0, 50.0]


def test_nothing_is_searched_for_while_the_twin_is_not_known() -> None:
    loop = watched(settings=replace(SETTINGS, profile=None))
    assert loop.search_due(observation(40.0)) is None
    assert loop.document()["state"] == "watching: the twin is fitted after 200 streamed answers (40 so far)"
    assert loop.document()["twin"]["step_times"] == "unknown"


def test_what_a_search_finds_is_tried_in_slices_and_adopted_for_good() -> None:
    loop = watched()
    loop.search_due(observation(40.0))
    assert loop.on_search_result(found(6), 40.0) == []
    orders: list[Retune] = []
    for second in range(40, 85):
        quick = bool(orders) and orders[-1].values[TARGET] == 6
        orders += loop.observe(observation(second + 1.0, [arrived(second, 0.05 if quick else 0.2)]))
    assert [order.values[TARGET] for order in orders] == [6, 6, 3, 6]
    assert [order.valid_s for order in orders] == [15.0, 15.0, None, None]
    assert loop.rollout.audit[-1].act is Act.ADOPTED
    assert loop.document()["studies"][0]["gain"] == 0.1
    # And nothing is searched for until the cool-down is over.
    assert loop.search_due(observation(90.0)) is None
    assert loop.search_due(observation(120.0)) is not None


def test_a_trial_knows_the_slice_noise() -> None:
    loop = ParameterLoop(CONFIGURED, SETTINGS, 0.0)
    for second in range(80):
        # Ten seconds good, ten seconds bad.
        loop.observe(observation(second + 1.0, [arrived(second, 0.2 if second // 10 % 2 == 0 else 3.0)]))
    loop.search_due(observation(80.0))
    loop.on_search_result(found(6), 80.0)
    orders: list[Retune] = []
    for second in range(80, 125):
        on_trial = bool(orders) and orders[-1].valid_s is not None
        orders += loop.observe(observation(second + 1.0, [arrived(second, 0.25 if on_trial else 0.2)]))
    verdict = loop.rollout.audit[-1]
    # A little worse is no harm where the slice noise is so large, nor is it a gain.
    assert verdict.act is Act.ROLLED_BACK
    assert "no better" in verdict.reason
    assert verdict.figures["pairs"] == 2
    assert verdict.figures["noise"] > 0.3


def test_a_new_scheduler_is_given_what_was_in_force_for_good() -> None:
    loop = watched()
    loop.rollout.incumbent = {**loop.rollout.incumbent, "target_waiting": 5}
    (order,) = loop.begin(CONFIGURED, 3.0)
    assert (order.values[TARGET], order.valid_s) == (5, None)
    # Its clock is another one, and nothing of the old traffic is left.
    assert loop.search_due(observation(4.0)) is None


def test_a_loop_that_is_started_again_knows_what_was_tried() -> None:
    loop = watched()
    loop.search_due(observation(40.0))
    loop.on_search_result(found(6), 41.0)
    state = json.loads(json.dumps(loop.state()))
    again = ParameterLoop(CONFIGURED, SETTINGS, 0.0)
    (order,) = again.begin(CONFIGURED, 0.0, state)
    assert order.values[TARGET] == 3
    assert again.rollout.audit[-1].act is Act.ROLLED_BACK
    assert again.document()["studies"] == loop.document()["studies"]


def test_a_broken_state_is_refused_and_the_loop_begins_without() -> None:
    again = ParameterLoop(CONFIGURED, SETTINGS, 0.0)
    with pytest.raises(ValueError, match="learned state"):
        again.begin(CONFIGURED, 0.0, {"rollout": {"version": 99}, "studies": []})
    assert again.rollout.incumbent["target_waiting"] == 3


def on_trial() -> tuple[ParameterLoop, float]:
    """A loop whose trial has a pair that waits for what the twin expects; and the time."""
    loop = watched(settings=CONTROLLED)
    loop.search_due(observation(40.0))
    assert loop.on_search_result(found(6), 40.0) == []
    loop.observe(observation(41.0, [arrived(40.0)]))
    task = loop.replay_due()
    assert task is not None
    # Slices of ten seconds since the beginning, each after what is known of two more.
    assert task.lead_s == 20.0
    assert [len(each.requests) for each in task.slices] == [10, 20, 30, 30]
    assert task.numbers == ()
    loop.on_replay_result(replay(task), 41.0)
    now = 41.0
    while loop.rollout.to_expect() == []:
        now += 1.0
        loop.observe(observation(now, [arrived(now - 1.0)]))
        assert now < 62.0
    return loop, now


def test_a_pair_waits_for_what_the_twin_expects_of_its_requests() -> None:
    loop, now = on_trial()
    task = loop.replay_due()
    assert task is not None
    assert task.numbers == (0, 1)
    assert [len(each.requests) for each in task.slices] == [30, 30]
    assert task.plan.tunable.scheduler.backpressure.target_waiting == 3
    assert loop.replay_due() is None
    loop.on_replay_result(replay(task), now)
    assert loop.rollout.to_expect() == []
    for second in range(int(now), int(now) + 21):
        loop.observe(observation(second + 1.0, [arrived(second)]))
    again = loop.replay_due()
    assert again is not None
    assert again.numbers == (2, 3)
    loop.on_replay_result(replay(again), now + 21)
    verdict = loop.rollout.audit[-1]
    assert verdict.act is Act.ROLLED_BACK
    assert "uncleared_difference" in verdict.figures


@pytest.mark.parametrize("end", ["fails", "comes too late"])
def test_a_trial_goes_on_without_expectations_that_do_not_come(end: str) -> None:
    loop, now = on_trial()
    task = loop.replay_due()
    assert task is not None
    if end == "fails":
        loop.on_replay_failure(now)
    else:
        for second in range(int(now), int(now) + 32):
            loop.observe(observation(second + 1.0, [arrived(second)]))
        now += 32
        assert loop.on_replay_result(replay(task), now) == []
    while loop.rollout.target is not None:
        now += 1.0
        loop.observe(observation(now, [arrived(now - 1.0)]))
        assert now < 120.0
    assert loop.replay_due() is None
    verdict = loop.rollout.audit[-1]
    assert verdict.act is Act.ROLLED_BACK
    assert verdict.figures["pairs"] == 2
    assert "uncleared_difference" not in verdict.figures


def test_an_expectation_of_a_trial_that_is_over_is_ignored() -> None:
    loop, now = on_trial()
    task = loop.replay_due()
    assert task is not None
    (order,) = loop.begin(CONFIGURED, 3.0)
    assert order.valid_s is None
    assert loop.on_replay_result(replay(task), now) == []
