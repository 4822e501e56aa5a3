from typing import Any

import pytest

from serve_app.core import events as ev
from serve_app.core.accounting.waits import current_cause
from serve_app.core.commands import Dispatch
from serve_app.core.request import PredictedWait
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.scheduler.documents import queue_document
from serve_app.serving.scheduler.gauges import (
    BoundedNames,
    Names,
    cost_figures,
    queue_figures,
)
from serve_app.serving.scheduler.journal import Entry
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from tests import builders
from tests.serving.scheduler.journals import pass_to
from tests.serving.scheduler.test_costs import busy


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
    figures = queue_figures(driver.scheduler, driver.now, Names())
    page = SchedulerMetrics("m").exposition(figures)
    assert f'ewsjf_blocked_heads{{cause="{cause}",model="m",pool="only"}}' in page
    assert current_cause(driver.find("r1")) == cause
    (shown,) = queue_document(driver.scheduler, driver.now, 10)["sub_queues"]
    assert shown["cause"] == cause


def test_names_from_traffic_are_bounded() -> None:
    names = BoundedNames(2)
    assert [names(each) for each in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_tenants_beyond_the_bound_share_a_label() -> None:
    for most, lines in (
        (0, ('tenant="other"} 3.0',)),
        (1, ('tenant="heavy"} 2.0', 'tenant="other"} 1.0')),
    ):
        names, driver = Names(of_tenants=BoundedNames(most)), busy()
        page = SchedulerMetrics("m").exposition(cost_figures(driver.scheduler, names))
        for line in lines:
            assert f'ewsjf_tenant_engine_seconds_total{{class="batch",model="m",pool="only",{line}' in page
    metrics = SchedulerMetrics("m", names)
    for tenant in ("heavy", "light", "third"):
        driver.arrive(tenant, tenant=tenant)
        ended = driver.find(tenant)
        ended.usage = Usage(prompt_tokens=100, output_tokens=5)
        metrics.on_end(ended, Outcome.COMPLETED, ("only",), 1)
    page = metrics.exposition([])
    assert 'ewsjf_tenant_requests_total{model="m",tenant="heavy"} 1.0' in page
    assert 'ewsjf_tenant_requests_total{model="m",tenant="other"} 2.0' in page
    assert "ewsjf_misroutes_total{" not in page, "there is one pool"


DISPATCH = Dispatch(
    request_id="r1",
    gateway_id="g1",
    replica_id="s1",
    pool="long",
    length_queue="all",
    estimated_tokens=50,
    queue_wait_s=0.3,
)


def test_the_mean_error_of_predicted_waits_is_relative_to_the_waits_of_a_class() -> None:
    driver = builders.ManualDriver()
    driver.arrive("r1")
    entry = driver.scheduler.find("r1")
    assert entry is not None
    metrics = SchedulerMetrics("m")
    for predicted_s, waited_s in ((25.0, 11.0), (1.0, 9.0), (0.1, 0.9)):
        entry.prediction = PredictedWait((1, 6, False, False), 1.0, predicted_s, predicted_s)
        entry.dispatched_at = 1.0 + waited_s
        pass_to(metrics, Entry(driver.scheduler, 0.0, ev.Woke(), [DISPATCH], requests=[entry]))
    # Predictions and waits of less than a second do not count.
    assert metrics.predictions(0.0) == {
        "default": {"requests": 2, "predicted_s": 13.0, "waited_s": 10.0, "error_s": 11.0}
    }
    figures = metrics.prediction_errors(0.0)
    assert (figures.name, dict(figures)) == ("ewsjf_queue_wait_prediction_error_ratio", {("default",): 1.1})
    assert metrics.predictions(3_600.0) == {}
