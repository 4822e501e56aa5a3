"""Forecasts of what it would be like if all requests were scheduled."""

from dataclasses import replace

import pytest

from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.tuning.online.parameter_search import ParameterTuningSettings
from serve_app.tuning.online.rollout_settings import RolloutSettings
from serve_app.tuning.online.tuned_simulation import TunedSimulation, counting_search
from serve_app.tuning.twin.digital_twin import DigitalTwin
from serve_app.tuning.twin.forecast import ForecastResult, Forecasts, ForecastTask, forecast
from serve_app.workloads.trace import scale_to_rate
from tests.tuning.twin.test_digital_twin import plan

NOTHING = {"requests": 0, "ttft_p50_s": None, "ttft_p99_s": None}
RESULT = ForecastResult(scheduled={"all": NOTHING}, passed={"all": NOTHING}, requests=400)


def task(rate_per_s: float) -> ForecastTask:
    chosen = plan(rate_per_s=rate_per_s)
    return ForecastTask(plan=chosen, arrivals=chosen.traffic)


def test_both_ways_have_the_same_requests_and_short_ones_gain_where_there_is_a_queue() -> None:
    found = forecast(task(30.0))
    assert found.scheduled["all"]["requests"] == found.passed["all"]["requests"] > 0
    assert found.requests == 400
    assert found.scheduled["short"]["ttft_p99_s"] < found.passed["short"]["ttft_p99_s"]


def test_what_passes_waits_in_no_queue_of_ours() -> None:
    chosen = plan(rate_per_s=30.0)
    scheduler = replace(chosen.tunable.scheduler, active_share=0.0)
    twin = DigitalTwin(replace(chosen, tunable=replace(chosen.tunable, scheduler=scheduler)))
    records = twin.serve(chosen.space.current, chosen.traffic)
    waits = [
        record.dispatched_at - record.arrived_at for record in records if record.dispatched_at is not None
    ]
    # The way to the scheduler and from there takes some milliseconds.
    assert max(waits) < 0.05


def test_forecasts_are_due_while_not_all_is_scheduled_and_the_twin_is_right() -> None:
    forecasts, chosen = Forecasts(), plan()
    assert forecasts.due(1.0, "", lambda: chosen, 0.0) is None
    assert forecasts.document(0.0) is None
    assert forecasts.due(0.0, "the twin is wrong", lambda: chosen, 1.0) is None
    assert forecasts.document(1.0) == {"note": "the twin is wrong"}
    few = replace(chosen, traffic=replace(chosen.traffic, requests=chosen.traffic.requests[:10]))
    assert forecasts.due(0.0, "", lambda: few, 2.0) is None
    assert forecasts.document(2.0) == {"note": "it forecasts after 200 requests (10 so far)"}
    assert forecasts.due(0.0, "", lambda: chosen, 3.0) is not None
    assert forecasts.due(0.0, "", lambda: chosen, 100.0) is None, "one at a time"
    forecasts.on_result(RESULT, 101.0)
    shown = forecasts.document(111.0)
    assert shown is not None
    assert (shown["requests"], shown["age_s"]) == (400, 10.0)
    assert forecasts.due(0.0, "", lambda: chosen, 102.0) is not None
    forecasts.on_result(None, 103.0)
    assert forecasts.document(111.0) == shown, "one that fails takes nothing away"
    assert forecasts.due(1.0, "", lambda: chosen, 200.0) is None
    assert forecasts.document(200.0) is None, "of no use any more"


def test_of_many_requests_the_latest_are_played() -> None:
    chosen = plan()
    own = chosen.traffic.requests
    requests = tuple(replace(own[number % len(own)]) for number in range(2_400))
    many = replace(chosen, traffic=replace(chosen.traffic, requests=requests))
    found = Forecasts().due(0.0, "", lambda: many, 0.0)
    assert found is not None
    assert len(requests) > len(found.arrivals.requests) == 2_000
    assert found.arrivals.requests[0] is requests[-2_000]
    assert found.arrivals.requests[-1] is requests[-1]


def test_a_production_that_only_observes_forecasts_what_scheduling_then_does() -> None:
    fleet = FleetSettings(profile="laptop", replicas={"all": 1})
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=1_500), 0), 25.0)
    requests = list(requests_of(trace, Disclosure(), 16))
    settings = scheduler_settings("ewsjf", fleet.routing, {})
    # Step times that are known spare the minutes until they are fitted.
    tuning = ParameterTuningSettings(profile="laptop")

    def production(active_share: float) -> TunedSimulation:
        chosen = replace(settings, active_share=active_share)
        rollout = RolloutSettings(mode="on" if active_share < 1 else "off")
        rolled = replace(tuning, rollout=rollout)
        return TunedSimulation(chosen, fleet.plans(isolated=True), rolled, counting_search(rolled, 2_000.0))

    observing, active = production(0.0), production(1.0)
    observing.run(requests)
    shown = observing.loop.document()["forecast"]
    assert observing.searches == 0, "nothing is searched for while requests pass by"
    records = active.run(requests)
    short = sorted(
        record.ttft_s for record in records[200:] if record.ttft_s is not None and record.prompt_tokens <= 256
    )
    found = shown["scheduled"]["short"]
    assert found["ttft_p50_s"] == pytest.approx(short[len(short) // 2], rel=0.5)
    assert found["ttft_p99_s"] < shown["passed"]["short"]["ttft_p99_s"]
