import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serve_app.core import events as ev
from serve_app.core.accounting.waits import waits_for
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.gauges import (
    BoundedNames,
    Names,
    PoolGauges,
    QueueGauges,
    look_at_pools,
    look_at_queue,
)
from tests import builders


def pages(driver: builders.ManualDriver) -> str:
    """What a scrape shows of a scheduler."""
    registry = CollectorRegistry()
    queue, pools = QueueGauges("m", Names()), PoolGauges("m")
    queue.figures = look_at_queue(driver.scheduler, driver.now)
    pools.pools = look_at_pools(driver.scheduler, driver.now)
    registry.register(queue)
    registry.register(pools)
    return generate_latest(registry).decode()


def test_who_waits_where_and_for_how_long() -> None:
    driver = builders.one_replica()
    builders.fill(driver)
    driver.arrive("r1", tenant="acme", priority=PriorityClass.BATCH)
    driver.now += 3.0
    driver.arrive("r2", tenant="acme", priority=PriorityClass.BATCH)
    driver.now += 2.0
    page = pages(driver)
    name = driver.find("r1").length_queue
    labels = f'{{class="batch",length_queue="{name}",model="m"}}'
    assert f"ewsjf_length_queue_requests_waiting{labels} 2.0" in page
    assert f"ewsjf_length_queue_oldest_wait_seconds{labels} 5.0" in page
    assert 'ewsjf_tenant_requests_waiting{model="m",tenant="acme"} 2.0' in page


def test_why_heads_wait_and_what_pools_could_take() -> None:
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
    driver.now += 60.0
    driver.report("l1")
    page = pages(driver)
    assert 'ewsjf_pool_replicas{model="m",pool="short",state="stale"} 1.0' in page
    assert 'ewsjf_pool_replicas{model="m",pool="long",state="open"} 1.0' in page
    assert 'ewsjf_pool_saturation_ratio{model="m",pool="short"}' not in page


@pytest.mark.parametrize(
    ("changes", "cause"), [({}, "engines_busy"), ({"draining": True}, "stale_report"), (None, "no_replica")]
)
def test_heads_are_blocked_by_what_receipts_say_that_they_waited_for(
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
    assert waits_for(driver.find("r1")) == cause
    (view,) = driver.scheduler.queue_snapshot(driver.now, 10).sub_queues
    assert view.cause == cause


def test_names_from_traffic_are_bounded() -> None:
    names = BoundedNames(2)
    assert [names(each) for each in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
