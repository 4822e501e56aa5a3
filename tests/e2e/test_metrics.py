"""Metrics reference against a scrape of a running application, in both directions."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs_reference.metrics import application_metrics
from tests.e2e.served import Served, start_tuner, wait_for

pytestmark = pytest.mark.usefixtures("app")

# Exported only with settings that this application leaves out.
_WITH_STATE = {"ewsjf_state_failures_total", "ewsjf_state_saved_timestamp_seconds"}
# Without series until this has happened or is used.
_WITHOUT_SERIES = {
    "ewsjf_gateway_put_backs_total": "an engine that fails",
    "ewsjf_gateway_fallbacks_total": "routes",
    "ewsjf_gateway_ignored_headers_total": "headers of other gateways",
    "ewsjf_latency_targets_total": "requests with latency targets",
    "ewsjf_observer_errors_total": "an observer that fails",
    "ewsjf_prefix_cached_tokens_total": "engines that report cached tokens",
    "ewsjf_prefix_prediction_error_ratio": "engines that report cached tokens",
    "ewsjf_endpoints": "remote pools",
    "ewsjf_key_requests_total": "API keys",
    "ewsjf_key_tokens_total": "API keys",
    "ewsjf_scaling_decisions_total": "a pool that is scaled",
    "ewsjf_spills_total": "a pool that is full",
    "ewsjf_misroutes_total": "a wrong estimate",
    "ewsjf_tuned_value": "a tuner that has started a canary",
    "ewsjf_twin_error_ratio": "a tuner that has checked its twin",
    "ewsjf_queue_wait_prediction_error_ratio": "requests that wait a second",
    "ewsjf_queue_wait_prediction_error_seconds": "requests that wait",
    "ewsjf_queue_estimates_total": "streams that subscribe to queue updates",
    "ewsjf_queue_estimate_error_seconds": "streams that subscribe to queue updates",
    "ewsjf_length_queue_requests_waiting": "requests that wait",
    "ewsjf_length_queue_oldest_wait_seconds": "requests that wait",
    "ewsjf_tenant_requests_waiting": "requests that wait",
    "ewsjf_tenant_lead_ratio": "two tenants",
    "ewsjf_blocked_heads": "requests that wait",
    "ewsjf_queue_wait_cause_seconds_total": "requests that wait",
    "ewsjf_tenant_imposed_delay_seconds_total": "tenants that wait for each other",
    "ewsjf_partition_age_seconds": "learned queues",
    "ewsjf_partition_changes_total": "learned queues",
}


def scrape(app: Served) -> dict[str, tuple[str, set[str], int]]:
    """Return type, labels and number of series of every metric of ours, by its name in the reference."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{app.url}/metrics", timeout=10).text):
        if not family.name.startswith("ewsjf_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels, len(family.samples))
    return found


def test_the_reference_is_what_a_scrape_shows(app: Served) -> None:
    for stream in (True, False):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "stream": stream,
        }
        assert httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    start_tuner(app)
    wait_for(lambda: scrape(app)["ewsjf_tuner_frozen"][2] > 0, 30, "the metrics of the tuner")
    wait_for(lambda: scrape(app)["ewsjf_desired_replicas"][2] > 0, 30, "autoscaling has decided")
    documented = application_metrics()
    wait_for(lambda: scrape(app).keys() | _WITH_STATE == documented.keys(), 10, "all processes are shown")
    live = scrape(app)
    for name, (kind, labels) in documented.items():
        if name in _WITH_STATE:
            continue
        assert live[name][0] == kind, name
        assert live[name][1] <= labels, name
        if not live[name][2]:
            assert name in _WITHOUT_SERIES, f"{name} has no series"
