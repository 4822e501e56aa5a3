from dataclasses import replace

from serve_app.core import SchedulerSettings
from serve_app.lab.simulation.run import FleetSettings, TraceChoice, choose_trace
from serve_app.lab.workloads import scale_to_rate
from serve_app.tuning.digital_twin import DigitalTwin, TwinPlan, TwinSettings
from serve_app.tuning.search_space import Tunable, space_of

FLEET = FleetSettings(profile="laptop", replicas={"all": 2})


def plan(
    *, rate_per_s: float = 8.0, policy: str = "ewsjf", window: int = 120, **settings: object
) -> TwinPlan:
    tunable = Tunable(
        scheduler=SchedulerSettings(model="m", policy=policy, routing=FLEET.routing, **settings)  # type: ignore[arg-type]
    )
    traffic = choose_trace(TraceChoice(name="paper-mix", requests=400, tenants="3"), 0)
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable),
        engines=tuple(FLEET.plans(isolated=True)),
        traffic=scale_to_rate(traffic, rate_per_s),
        settings=TwinSettings(window_requests=window, block_requests=30),
    )


def test_the_same_values_and_window_give_the_same_records() -> None:
    first, second = DigitalTwin(plan()), DigitalTwin(plan())
    values = plan().space.current
    assert first.records(values, 3) == second.records(values, 3)
    # No state carries over from one window to the next.
    assert first.play(values, 4) == second.play(values, 4)
    assert first.records(values, 3) == second.records(values, 3)


def test_candidates_meet_the_same_requests_at_the_same_times() -> None:
    twin = DigitalTwin(plan(rate_per_s=60.0))
    values = twin.records(plan(rate_per_s=60.0).space.current, 0)
    others = twin.records(
        {**plan(rate_per_s=60.0).space.current, "b_u": 5.0, "target_waiting": 16, "alpha": 1.0}, 0
    )
    assert [(one.arrived_at, one.prompt_tokens, one.output_tokens, one.tenant) for one in values] == [
        (one.arrived_at, one.prompt_tokens, one.output_tokens, one.tenant) for one in others
    ]
    assert [one.first_token_at for one in values] != [one.first_token_at for one in others]


def test_a_candidate_has_its_own_queues() -> None:
    twin = DigitalTwin(plan())
    queues = {
        wanted: len({one.length_queue for one in twin.records({**plan().space.current, "alpha": wanted}, 0)})
        for wanted in (1.0, 8.0)
    }
    assert queues[1.0] > 2 * queues[8.0]


def test_the_first_part_of_a_window_is_not_measured() -> None:
    played = DigitalTwin(plan()).play(plan().space.current, 0)
    assert (played.requests, played.reward.requests) == (120, 102)
    assert played.reward.value is not None
    assert played.reward.terms["attainment"] > 0


def test_the_scheduler_of_the_twin_has_learned_already() -> None:
    twin = DigitalTwin(plan(window=40))
    records = twin.records(plan(window=40).space.current, 0)
    # Without learning, the first requests would have the prior's expected length.
    known = [one.estimated_tokens for one in records]
    assert all(estimate is not None and estimate < 2_000 for estimate in known[:5])


def test_a_policy_without_queues_has_a_twin_as_well() -> None:
    fcfs = plan(policy="fcfs")
    assert fcfs.space.names == ("target_waiting",)
    assert DigitalTwin(fcfs).play(fcfs.space.current, 0).reward.value is not None


def test_requests_wait_no_longer_than_their_class_may() -> None:
    overloaded = plan(rate_per_s=500.0)
    timeouts = replace(overloaded.tunable.scheduler.queue_timeout_s, default=0.5)
    scheduler = replace(overloaded.tunable.scheduler, queue_timeout_s=timeouts)
    short = replace(overloaded, tunable=Tunable(scheduler=scheduler))
    outcomes = {one.outcome.value for one in DigitalTwin(short).records(short.space.current, 0)}
    assert "expired" in outcomes


def test_more_traffic_is_more_independent_windows() -> None:
    assert plan(window=100).independent_windows == 4.0
    assert plan(window=900).independent_windows == 1.0


def test_a_failure_has_no_reward_but_a_reason() -> None:
    failed = DigitalTwin(plan()).play({**plan().space.current, "target_waiting": 0}, 0).reward
    assert failed.value is None
    assert "target_waiting" in failed.reason
