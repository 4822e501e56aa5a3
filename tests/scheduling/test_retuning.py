from dataclasses import replace
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.commands import Command
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.events import Finished, FirstToken, Retuned
from serve_app.scheduling.isolation.prefill_isolation import IsolationSettings
from serve_app.scheduling.policies.settings import EwsjfSettings, GivenWeights
from tests.builders import Simulation, dispatched


def world(policy: str = "ewsjf", **changes: Any) -> Simulation:
    made = Simulation(policy=policy, routing=RoutingSettings(pools=("only",)), **changes)
    made.join("r1", "only", kv_tokens=20_000, max_model_len=8_000)
    return made


def retune(made: Simulation, **changes: Any) -> list[Command]:
    return made.feed(Retuned(replace(made.scheduler.settings, **changes)))


def test_a_higher_target_sends_more_in_the_same_moment() -> None:
    made = world(backpressure=BackpressureSettings(target_waiting=1))
    assert [bool(made.arrive(f"r{n}")) for n in range(3)] == [True, False, False]
    sent = retune(made, backpressure=BackpressureSettings(target_waiting=2))
    assert dispatched(sent) == [("r1", "r1")]


def test_more_long_prefills_may_go_in_the_same_moment() -> None:
    isolation = IsolationSettings(prior_boundary_tokens=300, max_long_prefills=1)
    made = world(isolation=isolation)
    made.arrive("long1", prompt_tokens=500)
    assert made.arrive("long2", prompt_tokens=500) == []
    assert dispatched(retune(made, isolation=replace(isolation, max_long_prefills=2))) == [("long2", "r1")]


def test_boundaries_follow_other_shares_of_what_was_learned() -> None:
    made = world()
    for number in range(300):
        made.arrive(f"r{number}", prompt_tokens=50 + 10 * (number % 60))
        made.feed(FirstToken(f"r{number}"))
        made.feed(Finished(f"r{number}", Outcome.COMPLETED))
    before = made.scheduler.isolation.boundary_tokens
    retune(made, isolation=IsolationSettings(short_work_share=0.45))
    assert made.scheduler.isolation.boundary_tokens > before


def test_other_weights_change_who_goes_next_and_nobody_is_lost() -> None:
    def order(weights: GivenWeights) -> list[str]:
        made = world(backpressure=BackpressureSettings(target_waiting=1))
        made.arrive("running")
        made.arrive("old long", prompt_tokens=900)
        made.now += 1.5
        made.arrive("new short", prompt_tokens=20)
        retune(made, ewsjf=EwsjfSettings(weights=weights))
        served = [made.feed(FirstToken("running"))]
        served.append(made.feed(FirstToken(dispatched(served[0])[0][0])))
        return [dispatched(commands)[0][0] for commands in served]

    assert order(GivenWeights(a_u=0.0, b_u=0.01)) == ["new short", "old long"]
    assert order(GivenWeights(a_u=1.0, b_u=5.0)) == ["old long", "new short"]


def test_what_queues_and_promises_are_built_on_cannot_change() -> None:
    made = world()
    current: SchedulerSettings = made.scheduler.settings
    with pytest.raises(ValueError, match="policy cannot change so in a running scheduler"):
        made.feed(Retuned(replace(current, policy="fcfs")))
    with pytest.raises(ValueError, match="isolation"):
        made.feed(Retuned(replace(current, isolation=replace(current.isolation, max_long_prefills=0))))
    with pytest.raises(ValueError, match="backpressure"):
        made.feed(Retuned(replace(current, backpressure=BackpressureSettings(report_limit_s=9.0))))
    assert made.scheduler.settings == current
