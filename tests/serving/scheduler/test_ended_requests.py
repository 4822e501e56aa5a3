from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.scheduler.gauges import BoundedNames, Names
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from tests import builders

POOLS = ("short", "long")


def test_errors_of_estimates_wrong_routes_and_tenants_are_counted() -> None:
    driver = builders.two_pools()
    driver.arrive("r1", tenant="acme")
    ended = driver.find("r1")
    assert ended.pools[0] == "short"
    metrics = SchedulerMetrics("m")
    expected = ended.estimate.expected_prompt_tokens
    ended.usage = Usage(prompt_tokens=2 * expected, output_tokens=900)
    metrics.on_end(ended, Outcome.COMPLETED, POOLS, 500)
    ended.usage = Usage(prompt_tokens=100, output_tokens=5)
    metrics.on_end(ended, Outcome.FAILED, POOLS, 500)
    page = metrics.exposition([])
    for line in (
        'ewsjf_estimate_ratio_bucket{kind="prompt",le="0.5",model="m"} 1.0',
        'ewsjf_estimate_ratio_bucket{kind="prompt",le="0.25",model="m"} 0.0',
        'ewsjf_estimate_ratio_count{kind="prompt",model="m"} 1.0',
        'ewsjf_misroutes_total{actual="long",model="m",pool="short"} 1.0',
        'ewsjf_tenant_requests_total{model="m",tenant="acme"} 2.0',
        'ewsjf_tenant_tokens_total{kind="output",model="m",tenant="acme"} 905.0',
    ):
        assert line in page, line


def test_a_request_in_its_own_pool_is_no_wrong_route() -> None:
    driver = builders.two_pools()
    driver.arrive("r1")
    ended = driver.find("r1")
    metrics = SchedulerMetrics("m")
    ended.usage = Usage(prompt_tokens=10, output_tokens=5)
    metrics.on_end(ended, Outcome.COMPLETED, POOLS, 500)
    metrics.on_end(ended, Outcome.COMPLETED, ("short",), 1)
    assert "ewsjf_misroutes_total{" not in metrics.exposition([])


def test_more_tenants_than_names_share_a_label() -> None:
    driver = builders.two_pools()
    metrics = SchedulerMetrics("m", Names(of_tenants=BoundedNames(1)))
    for number in range(3):
        driver.arrive(f"r{number}", tenant=f"t{number}")
        metrics.on_end(driver.find(f"r{number}"), Outcome.COMPLETED, POOLS, 500)
    page = metrics.exposition([])
    assert 'ewsjf_tenant_requests_total{model="m",tenant="t0"} 1.0' in page
    assert 'ewsjf_tenant_requests_total{model="m",tenant="other"} 2.0' in page
