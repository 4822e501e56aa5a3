import math
import re
from typing import Any

import pytest

from serve_app.core import events as ev
from serve_app.core.accounting.waits import current_cause
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler.gauges import (
    BoundedNames,
    Names,
    core_figures,
    cost_figures,
    figure,
    pool_figures,
    queue_figures,
    queued_figures,
)
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from tests import builders
from tests.serving.scheduler.test_costs import busy


def pages(driver: builders.ManualDriver, most_tenants: int = 10) -> str:
    """Return a scheduler's metrics page."""
    core, now, names = driver.scheduler, driver.now, Names(of_tenants=BoundedNames(most_tenants))
    figures = [*queue_figures(core, now, names), *pool_figures(core, now), *cost_figures(core, names)]
    return SchedulerMetrics("m").exposition(figures)


def test_gauges_have_the_number_and_the_size_of_queued_requests() -> None:
    driver = builders.one_replica()
    builders.fill(driver)
    driver.arrive("r1", priority=PriorityClass.BATCH)
    driver.arrive("r2", priority=PriorityClass.BATCH)
    values = {each.name: each for each in queued_figures(driver.scheduler)}
    waiting = [driver.find("r1"), driver.find("r2")]
    assert values["ewsjf_requests_waiting"] == {("interactive",): 0, ("default",): 0, ("batch",): 2}
    assert values["ewsjf_queued_tokens"]["batch",] == sum(each.estimate.expected_tokens for each in waiting)
    assert (
        values["ewsjf_queued_bytes"]["batch",] == sum(each.request.shape.text_bytes for each in waiting) > 0
    )
    assert values["ewsjf_queued_tokens"]["default",] == 0


def test_gauges_have_queue_lengths_and_oldest_waits() -> None:
    driver = builders.one_replica()
    builders.fill(driver)
    driver.arrive("r1", tenant="acme", priority=PriorityClass.BATCH)
    driver.now += 3.0
    driver.arrive("r2", tenant="acme", priority=PriorityClass.BATCH)
    driver.arrive("r3", tenant="zeta", priority=PriorityClass.BATCH)
    driver.now += 2.0
    page = pages(driver)
    name = driver.find("r1").length_queue
    labels = f'{{class="batch",length_queue="{name}",model="m"}}'
    assert f"ewsjf_length_queue_requests_waiting{labels} 3.0" in page
    assert f"ewsjf_length_queue_oldest_wait_seconds{labels} 5.0" in page
    assert 'ewsjf_tenant_requests_waiting{model="m",tenant="acme"} 2.0' in page


def test_gauges_have_blocked_heads_and_capacity_of_pools() -> None:
    driver = builders.one_replica()
    assert 'ewsjf_pool_saturation_ratio{model="m",pool="only"} 0.0' in pages(driver)
    builders.fill(driver)
    driver.arrive("r1")
    page = pages(driver)
    assert 'ewsjf_blocked_heads{cause="engines_busy",model="m",pool="only"} 1.0' in page
    assert 'ewsjf_pool_replicas{model="m",pool="only",state="saturated"} 1.0' in page
    assert 'ewsjf_pool_saturation_ratio{model="m",pool="only"} 1.0' in page
    assert re.search(r'ewsjf_pool_kv_reserved_ratio\{model="m",pool="only"\} 0\.\d+', page)


def test_states_of_replicas_that_take_nothing() -> None:
    driver = builders.two_pools()
    driver.report("s1", draining=True)
    assert 'ewsjf_pool_replicas{model="m",pool="short",state="draining"} 1.0' in pages(driver)
    driver.report("s1")
    ledger = driver.scheduler.ledger
    ledger.reserve(ledger["s1"], ledger["s1"].kv_budget)
    assert 'ewsjf_pool_replicas{model="m",pool="short",state="saturated"} 1.0' in pages(driver)
    ledger.suspend(ledger["s1"], math.inf)
    assert 'ewsjf_pool_replicas{model="m",pool="short",state="suspended"} 1.0' in pages(driver)
    driver.now += 60.0
    driver.report("l1")
    page = pages(driver)
    assert 'ewsjf_pool_replicas{model="m",pool="short",state="stale"} 1.0' in page
    assert 'ewsjf_pool_replicas{model="m",pool="long",state="open"} 1.0' in page
    assert 'ewsjf_pool_saturation_ratio{model="m",pool="short"}' not in page


@pytest.mark.parametrize(
    ("changes", "cause"), [({}, "engines_busy"), ({"draining": True}, "stale_report"), (None, "no_replica")]
)
def test_heads_are_blocked_by_the_causes_in_their_receipts(
    changes: dict[str, Any] | None, cause: str
) -> None:
    driver = builders.one_replica()
    builders.fill(driver)
    driver.arrive("r1")
    if changes is None:
        driver.feed(ev.ReplicaLost("r1"))
    elif changes:
        driver.report("r1", **changes)
    assert f'ewsjf_blocked_heads{{cause="{cause}",model="m",pool="only"}}' in pages(driver)
    assert current_cause(driver.find("r1")) == cause
    (view,) = driver.scheduler.queue_snapshot(driver.now, 10).sub_queues
    assert view.cause == cause


def test_engine_time_is_counted_by_pool_class_and_tenant() -> None:
    line = 'ewsjf_tenant_engine_seconds_total{class="batch",model="m",pool="only",tenant="%s"} %s'
    shown = pages(busy())
    assert line % ("heavy", "2.0") in shown
    assert line % ("light", "1.0") in shown
    # The lead is in tokens, not time: a share of the class's tokens.
    assert 'ewsjf_tenant_lead_ratio{class="batch",model="m",tenant="heavy"} 0.0' in shown
    assert 'ewsjf_tenant_lead_ratio{class="batch",model="m",tenant="light"} 1.0' in shown
    bounded = pages(busy(), most_tenants=1)
    assert line % ("heavy", "2.0") in bounded
    assert line % ("other", "1.0") in bounded
    assert line % ("other", "3.0") in pages(busy(), most_tenants=0)


def test_figures_of_a_core_have_the_values_of_their_names() -> None:
    core = builders.ManualDriver().scheduler
    programs, errors = core.programs, core.admission.predictor.errors
    programs.turns, programs.saved_tokens, programs.moved, programs.forced = 1, 2, 3, 4
    errors.mean_s, errors.mean_absolute_s, errors.expired = 5.0, 6.0, 7
    assert {each.name.removeprefix("ewsjf_"): each[()] for each in core_figures(core)} == {
        "queue_drain_tokens_per_second": 0.0,
        "retry_reservations": 0,
        "b_short_tokens": 500,
        "queue_wait_prediction_error_mean_seconds": 5.0,
        "queue_wait_prediction_error_absolute_mean_seconds": 6.0,
        "queue_wait_mispredictions": 7,
        "program_known": 0,
        "program_turns_waiting": 0,
        "program_turns": 1,
        "program_saved_tokens": 2,
        "program_moves": 3,
        "program_forced_turns": 4,
    }


def test_delay_is_counted_where_it_was_imposed() -> None:
    driver = builders.one_replica(backpressure=BackpressureSettings(report_limit_s=1_000.0))
    builders.fill(driver)
    driver.arrive("ahead", tenant="first", priority=PriorityClass.INTERACTIVE)
    driver.arrive("behind", tenant="second", priority=PriorityClass.INTERACTIVE)
    usage = Usage(prompt_tokens=50, output_tokens=5)
    driver.feed(ev.Finished("f0", Outcome.COMPLETED, usage), after_s=3.0)

    labels = 'class="interactive",model="m",pool="only",tenant="first"'
    assert f"ewsjf_tenant_imposed_delay_seconds_total{{{labels}}} 3.0" in pages(driver)


def test_an_unknown_figure_has_no_sample() -> None:
    page = SchedulerMetrics("m").exposition([figure("ewsjf_a", "A.", None), figure("ewsjf_b", "B.", 0.0)])
    assert "# TYPE ewsjf_a gauge" in page
    assert "ewsjf_a{" not in page
    assert 'ewsjf_b{model="m"} 0.0' in page


def test_names_from_traffic_are_bounded() -> None:
    names = BoundedNames(2)
    assert [names(each) for each in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
