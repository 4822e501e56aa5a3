"""Dashboard and alert files: errors that Grafana or Prometheus would report, and omissions."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from observability.files import DASHBOARDS, OBSERVABILITY, ROOT, files
from tests.docs.code import check_promql
from tests.observability.prometheus import program, rules

PATHS = sorted((OBSERVABILITY / "dashboards").glob("*.json"))
# Grafana unit names that are used here.
UNITS = {"s", "short", "reqps", "ops", "percentunit", "bytes"}
KINDS = {"timeseries", "stat", "heatmap", "table"}


def dashboard(path: Path) -> Any:
    return json.loads(path.read_text())


def panels(path: Path) -> list[Any]:
    """Return the panels with queries."""
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


def test_generated_files_are_up_to_date() -> None:
    outdated = [path.name for path, text in files() if not path.is_file() or path.read_text() != text]
    assert not outdated, "run `scripts/docs generate`"
    kept = {path for path, _ in files()}
    for folder in (OBSERVABILITY, ROOT / "configs/helm/files"):
        assert {path for path in folder.rglob("*.json") if path not in kept} == set()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_grafana_reads_a_dashboard_unchanged(path: Path) -> None:
    read = dashboard(path)
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= read.keys()
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", read["uid"])
    ids = [panel["id"] for panel in read["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in read["templating"]["list"]}
    assert {"datasource", "model", "interval"} <= variables.keys()
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    assert all(each["datasource"] == datasource for each in variables.values() if each["type"] == "query")
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps([panels(path), read["templating"]])))
    assert used - {"__all"} <= variables.keys()
    for panel in panels(path):
        assert panel["type"] in KINDS
        assert panel["datasource"] == datasource
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["title"]
        assert panel["description"].endswith(".")
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        assert all(target["datasource"] == datasource for target in panel["targets"])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_grafana_reads_everything_in_a_dashboard(path: Path) -> None:
    reason = "grafana-foundation-sdk is missing: run scripts/setup dev"
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    read = models.Dashboard.from_json(dashboard(path))
    lost = list(_lost(dashboard(path), json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))))
    assert not lost


def _lost(written: Any, read: Any, place: str = "") -> Iterator[str]:
    """Yield the settings that were read differently from how they are written."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from _lost(value, read.get(key), f"{place}/{key}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, (mine, theirs) in enumerate(zip(written, read, strict=True)):
            yield from _lost(mine, theirs, f"{place}/{index}")
    elif written != read:
        yield f"{place}: {written!r} became {read!r}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_stay_within_the_grid(path: Path) -> None:
    places = [panel["gridPos"] for panel in dashboard(path)["panels"]]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or apart, (one, other)


def test_uids_and_titles_are_unique() -> None:
    assert len({dashboard(path)["uid"] for path in PATHS}) == len(PATHS) == len(DASHBOARDS)
    assert len({dashboard(path)["title"] for path in PATHS}) == len(PATHS)


def test_every_query_uses_metrics_that_exist() -> None:
    for path in PATHS:
        for panel in panels(path):
            for target in panel["targets"]:
                check_promql(target["expr"].replace("$interval", "5m"))
    for rule in rules():
        check_promql(rule["expr"])


def test_scheduling_has_a_heatmap_of_waits_by_length_queue() -> None:
    heatmaps = [
        each for each in panels(OBSERVABILITY / "dashboards/scheduling.json") if each["type"] == "heatmap"
    ]
    assert any("ewsjf_length_queue_wait_seconds" in each["targets"][0]["expr"] for each in heatmaps)
    assert any(each["targets"][0].get("format") == "heatmap" for each in heatmaps)


def test_every_alert_leads_to_its_runbook() -> None:
    text = (ROOT / "docs/alerts.md").read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"\n#+ (.*)", text)
    }
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (file, anchor) == ("docs/alerts.md", rule["alert"].lower())
        assert anchor in headings
        assert rule["annotations"]["summary"].endswith(".")
    critical = [rule["alert"] for rule in rules() if rule["labels"]["severity"] == "critical"]
    assert re.findall(r"`(\w+)`", text.partition(" have severity")[0].rpartition(". ")[2]) == critical
    alerts = text.partition("## Runbook")[2].partition("\n## ")[0]
    assert re.findall(r"\n### (.*)", alerts) == [rule["alert"] for rule in rules()]


def test_prometheus_takes_the_settings_and_the_rules() -> None:
    for what, file in (("config", "prometheus.yaml"), ("rules", "alerts.yaml")):
        command = (program("promtool"), "check", what, str(OBSERVABILITY / file))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
