from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from serve_app.core import events as ev
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler.gauges import BoundedNames, CostCounters, Names, look_at_costs
from tests.builders import ManualDriver, fill, one_replica


def busy() -> ManualDriver:
    """Two tenants have used the engine, one for two seconds and one for one; who waited has not begun."""
    driver = one_replica(backpressure=BackpressureSettings(report_limit_s=1_000.0))
    for tenant, seconds in (("heavy", 2.0), ("light", 1.0)):
        driver.arrive(tenant, tenant=tenant, prompt_tokens=1, priority=PriorityClass.BATCH)
        usage = Usage(prompt_tokens=1, output_tokens=5)
        driver.feed(ev.Finished(tenant, Outcome.COMPLETED, usage), after_s=seconds)
    return driver


def page(driver: ManualDriver, most_tenants: int = 10) -> str:
    registry = CollectorRegistry()
    counters = CostCounters("m", Names(of_tenants=BoundedNames(most_tenants)))
    registry.register(counters)
    counters.figures = look_at_costs(driver.scheduler)
    return generate_latest(registry).decode()


def test_engine_time_is_counted_by_pool_class_and_tenant() -> None:
    shown = page(busy())

    line = 'ewsjf_tenant_engine_seconds_total{class="batch",model="m",pool="only",tenant="%s"} %s'
    assert line % ("heavy", "2.0") in shown
    assert line % ("light", "1.0") in shown


def test_the_names_of_tenants_are_bounded() -> None:
    shown = page(busy(), most_tenants=1)

    assert 'tenant="heavy"} 2.0' in shown
    assert 'tenant="other"} 1.0' in shown
    assert "light" not in shown


def test_delay_is_counted_where_it_was_imposed() -> None:
    driver = one_replica(backpressure=BackpressureSettings(report_limit_s=1_000.0))
    fill(driver)
    driver.arrive("ahead", tenant="first", priority=PriorityClass.INTERACTIVE)
    driver.arrive("behind", tenant="second", priority=PriorityClass.INTERACTIVE)
    usage = Usage(prompt_tokens=50, output_tokens=5)
    driver.feed(ev.Finished("f0", Outcome.COMPLETED, usage), after_s=3.0)

    labels = 'class="interactive",model="m",pool="only",tenant="first"'
    assert f"ewsjf_tenant_imposed_delay_seconds_total{{{labels}}} 3.0" in page(driver)
