"""Alerts, dashboards and scaling by metrics: they use what is exported, and say what the documents say."""

import json
import re
from typing import Any

import yaml

from tests.chart.rendered import CHART, container, groups, only, render, values_of
from tests.docs.code import check_promql
from tests.docs.documents import ROOT

DOCS_URL = "https://example.com/docs"
WATCHED = {
    "metrics": {
        "serviceMonitor": {"enabled": True},
        "engines": {"enabled": True},
        "rules": {"enabled": True},
        "dashboard": {"enabled": True},
        "docsUrl": DOCS_URL,
    }
}


def rules() -> list[dict[str, Any]]:
    (group,) = only(render(WATCHED), "PrometheusRule")["spec"]["groups"]
    return list(group["rules"])


def test_alerts_are_those_of_the_operations_page() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (block,) = re.findall(r"```yaml\n(groups:.*?)```", page, re.DOTALL)
    (documented,) = yaml.safe_load(block)["groups"]
    expressions = [{key: rule[key] for key in rule if key in ("alert", "expr", "for")} for rule in rules()]
    assert expressions == documented["rules"]


def test_alerts_and_panels_use_metrics_that_exist() -> None:
    for rule in rules():
        check_promql(rule["expr"])
    dashboard = json.loads(only(render(WATCHED), "ConfigMap")["data"]["ewsjf.json"])
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= len(dashboard["panels"]) > 0
    for expression in expressions:
        check_promql(expression)


def test_every_alert_leads_to_its_answer() -> None:
    for rule in rules():
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        text = (ROOT / file).read_text()
        headings = [re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines()]
        assert anchor in headings
        assert rule["annotations"]["runbook_url"] == f"{DOCS_URL}/{file.removeprefix('docs/')}#{anchor}"
        assert f"\n| {rule['alert']} | " in text


def test_panels_choose_from_variables_that_the_dashboard_has() -> None:
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard["panels"])))
    assert used == variables
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"])


def test_prometheus_shows_the_key_that_the_application_asks_for() -> None:
    objects = render(WATCHED)
    service = only(objects, "RayService")
    (endpoint,) = only(objects, "ServiceMonitor")["spec"]["endpoints"]
    secret = endpoint["authorization"]["credentials"]
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert secret["key"] == application["gateway"]["advanced"]["metrics_key"]["env"]
    for group in groups(service):
        assert container(group)["envFrom"] == [{"secretRef": {"name": secret["name"]}}]
    scraped = only(objects, "ScrapeConfig")["spec"]
    assert scraped["authorization"] == endpoint["authorization"]
    (discovery,) = scraped["httpSDConfigs"]
    assert discovery["authorization"] == endpoint["authorization"]
    assert discovery["url"] == "http://ewsjf-serve-svc.llm:8000/metrics/engines"
    # What KubeRay calls the Service of the application `ewsjf`.
    labels = only(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert labels == {"ray.io/serve": "ewsjf-serve"}


def test_without_a_key_prometheus_shows_none() -> None:
    open_to_all = {
        "application": {"gateway": {"keys": [], "insecure": True, "advanced": {"metrics_key": None}}}
    }
    objects = render({**WATCHED, **open_to_all})
    (endpoint,) = only(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in endpoint
    assert "authorization" not in only(objects, "ScrapeConfig")["spec"]


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
        # An average over replicas of a wish for replicas, divided by one, is the wish.
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")


def test_fleets_scale_by_a_metric_that_exists() -> None:
    for scaled in render(values_of("servers_outside")):
        if scaled["kind"] == "ScaledObject":
            check_promql(scaled["spec"]["triggers"][0]["metadata"]["query"])
