"""Alerts, dashboards and metric-based scaling: they use exported metrics and match the documents."""

import json
import re
from typing import Any

import yaml

from observability.files import OBSERVABILITY
from tests.chart.rendered import container, groups, only, render, values_of
from tests.docs.code import check_promql

DOCS_URL = "https://example.com/docs"
WATCHED = {
    "metrics": {
        "application": {"enabled": True},
        "engines": {"enabled": True},
        "rules": {"enabled": True},
        "dashboard": {"enabled": True},
        "docsUrl": DOCS_URL,
    }
}


def rules() -> list[dict[str, Any]]:
    (group,) = only(render(WATCHED), "PrometheusRule")["spec"]["groups"]
    return list(group["rules"])


def test_alerts_are_those_of_the_observability_folder() -> None:
    (group,) = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    for rule, given in zip(rules(), group["rules"], strict=True):
        assert {**rule, "annotations": {}} == {**given, "annotations": {}}
        assert rule["annotations"]["summary"] == given["annotations"]["summary"]
        page = given["annotations"]["runbook_url"].removeprefix("docs/")
        assert rule["annotations"]["runbook_url"] == f"{DOCS_URL}/{page}"


def test_without_an_address_of_documents_alerts_name_the_page() -> None:
    values = {"metrics": {**WATCHED["metrics"], "docsUrl": ""}}
    (group,) = only(render(values), "PrometheusRule")["spec"]["groups"]
    assert group["rules"][0]["annotations"]["runbook_url"].startswith("docs/alerts.md#")


def test_dashboards_are_those_of_the_observability_folder() -> None:
    data = only(render(WATCHED), "ConfigMap")["data"]
    found = {name.removeprefix("ewsjf-"): json.loads(text) for name, text in data.items()}
    assert found == {
        path.name: json.loads(path.read_text()) for path in (OBSERVABILITY / "dashboards").glob("*.json")
    }


def test_prometheus_sends_the_key_that_the_application_requires() -> None:
    objects = render(WATCHED)
    service = only(objects, "RayService")
    scraped = only(objects, "ScrapeConfig", "ewsjf")["spec"]
    secret = scraped["authorization"]["credentials"]
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert secret["key"] == application["gateway"]["advanced"]["metrics_key"]["env"]
    for group in groups(service):
        assert container(group)["envFrom"] == [{"secretRef": {"name": secret["name"]}}]
    # KubeRay's Service name for the application `ewsjf`; one target, because each page covers all gateways.
    assert scraped["staticConfigs"] == [{"targets": ["ewsjf-serve-svc.llm:8000"]}]
    engines = only(objects, "ScrapeConfig", "-engines")["spec"]
    assert engines["authorization"] == scraped["authorization"]
    (discovery,) = engines["httpSDConfigs"]
    assert discovery["authorization"] == scraped["authorization"]
    assert discovery["url"] == "http://ewsjf-serve-svc.llm:8000/metrics/engines"


def test_without_a_key_prometheus_shows_none() -> None:
    open_to_all = {
        "application": {"gateway": {"keys": [], "insecure": True, "advanced": {"metrics_key": None}}}
    }
    objects = render({**WATCHED, **open_to_all})
    for ending in ("ewsjf", "-engines"):
        assert "authorization" not in only(objects, "ScrapeConfig", ending)["spec"]


def test_fleets_scale_by_the_pool_that_they_serve() -> None:
    values = values_of("servers_outside")
    objects = render(values)
    pools = {pool["name"] for pool in values["application"]["models"][0]["pools"]}
    for fleet in values["keda"]["fleets"]:
        scaled = only(objects, "ScaledObject", fleet["deployment"])["spec"]
        assert scaled["scaleTargetRef"] == {"name": fleet["deployment"]}
        (trigger,) = scaled["triggers"]
        found = re.search(r'\{model="([^"]*)",pool="([^"]*)"\}', trigger["metadata"]["query"])
        assert found is not None
        assert found.groups() == (fleet["model"], fleet["pool"])
        assert fleet["pool"] in pools
        # The average of a replica count over replicas, with a threshold of one, is that count.
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")


def test_fleets_scale_by_a_metric_that_exists() -> None:
    scaled = [each for each in render(values_of("servers_outside")) if each["kind"] == "ScaledObject"]
    assert scaled
    for each in scaled:
        check_promql(each["spec"]["triggers"][0]["metadata"]["query"])
