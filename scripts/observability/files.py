"""Generated files: the Grafana dashboards, and the chart's copies of the dashboards and alerts."""

import json
from collections.abc import Iterator
from pathlib import Path

from observability.overview import OVERVIEW
from observability.panels import rendered
from observability.pools import POOLS
from observability.saturation import SATURATION
from observability.scheduling import SCHEDULING
from observability.tenants import TENANTS
from observability.tuner import TUNER

ROOT = Path(__file__).resolve().parents[2]
OBSERVABILITY = ROOT / "configs" / "observability"
_CHART = ROOT / "configs" / "helm" / "files"
_ALERTS = "alerts.yaml"

DASHBOARDS = (OVERVIEW, SATURATION, SCHEDULING, TENANTS, POOLS, TUNER)


def files() -> Iterator[tuple[Path, str]]:
    """Yield every generated file with its text."""
    for dashboard in DASHBOARDS:
        text = json.dumps(rendered(dashboard), indent=2) + "\n"
        for folder in (OBSERVABILITY, _CHART):
            yield folder / "dashboards" / f"{dashboard.name}.json", text
    yield _CHART / _ALERTS, (OBSERVABILITY / _ALERTS).read_text(encoding="utf-8")


def write_files() -> None:
    """Write every generated file."""
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
