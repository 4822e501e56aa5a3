"""Definitions of panels and dashboards, and their conversion to Grafana's JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_WIDTH, _HEIGHT, _STAT_HEIGHT = 24, 8, 4
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# The schema of Grafana 11; later releases read it unchanged.
_SCHEMA_VERSION = 39

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel.

    Attributes:
        text: description: content and interpretation.
        unit: unit name in Grafana.
        rows: rows of a heatmap: buckets of a histogram, or series.
        at_most: upper limit of the axis.
        stacked: stack the series.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "heatmap", "table"] = "timeseries"
    width: int = 12
    rows: Literal["buckets", "series"] = "series"
    at_most: float | None = None
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down at the top of a dashboard: values of a label."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard.

    Attributes:
        name: file name and end of the uid.
        sections: pairs of title and panels.
    """

    name: str
    title: str
    text: str
    sections: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[Variable] = field(default=())


def line(title: str, text: str, unit: str, *queries: tuple[str, str] | str, **more: Any) -> Panel:
    """Return a line panel of expressions with or without a legend."""
    made = tuple(Query(each) if isinstance(each, str) else Query(*each) for each in queries)
    return Panel(title, text, unit, made, **more)


def rendered(dashboard: Dashboard) -> Json:
    """Return the JSON of a dashboard."""
    variables = [_datasource(), _choice(Variable("model", "ewsjf_requests_waiting", "model")), _interval()]
    return {
        "title": f"ewsjf: {dashboard.title}",
        "uid": f"ewsjf-{dashboard.name}",
        "description": dashboard.text,
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["ewsjf", "llm"],
        "links": [
            {
                "type": "dashboards",
                "title": "ewsjf",
                "tags": ["ewsjf"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": [*variables, *map(_choice, dashboard.variables)]},
        "panels": list(_placed(dashboard)),
    }


def _placed(dashboard: Dashboard) -> Iterator[Json]:
    number = y = 0
    for title, panels in dashboard.sections:
        number += 1
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        x = height = 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            own = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
            yield _panel(panel, number, {"h": own, "w": panel.width, "x": x, "y": y})
            x, height = x + panel.width, max(height, own)
        y += height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> Json:
    defaults: Json = {"unit": panel.unit, "min": 0, "custom": {}}
    if panel.at_most is not None:
        defaults["max"] = panel.at_most
    if panel.kind == "timeseries":
        fill, mode = (30, "normal") if panel.stacked else (0, "none")
        defaults["custom"] = {"fillOpacity": fill, "stacking": {"mode": mode}}
    if any(word in panel.title.lower() for word in ("error", "tuned")):
        del defaults["min"]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
    }


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": "s" if panel.rows == "buckets" else "short"},
                "cellValues": {"unit": panel.unit},
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "rowsFrame": {"layout": "auto"},
            }
        case "table":
            return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _target(panel: Panel, query: Query, index: int) -> Json:
    target: Json = {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
    }
    if panel.kind == "heatmap" and panel.rows == "buckets":
        target["format"] = "heatmap"
    elif panel.kind == "table":
        target |= {"format": "table", "instant": True}
    return target


def _datasource() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _choice(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({variable.metric}, {variable.label})", "refId": variable.name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _interval() -> Json:
    return {
        "name": "interval",
        "label": "interval",
        "type": "interval",
        "query": "1m,5m,15m,1h",
        "current": {"text": "5m", "value": "5m"},
    }
