"""Real Prometheus for tests: scrapes an application, answers queries and fires alerts."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from observability.files import OBSERVABILITY, ROOT
from tests.e2e.served import wait_for
from tests.engines.servers import free_port

_REASON = "there is no Prometheus: run scripts/fetch_prometheus"
_INTERVAL = "1s"


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test if it is not installed."""
    fetched = ROOT / os.environ.get("VENV", ".venv") / "opt" / "prometheus" / "bin" / name
    found = str(fetched) if fetched.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(_REASON)
    return found


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def value(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the current result of a query, without values that are not numbers."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", (query, answer)
        found = [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]
        return [(labels, value) for labels, value in found if value == value]

    def firing(self) -> set[str]:
        """Return the names of firing alerts."""
        answer = httpx.get(f"{self.url}/api/v1/alerts", timeout=10).json()
        return {each["labels"]["alertname"] for each in answer["data"]["alerts"] if each["state"] == "firing"}

    def targets(self) -> dict[str, int]:
        """Return the healthy targets by job."""
        active = httpx.get(f"{self.url}/api/v1/targets", timeout=10).json()["data"]["activeTargets"]
        found: dict[str, int] = {}
        for each in active:
            job = each["labels"]["job"]
            found[job] = found.get(job, 0) + (each["health"] == "up")
        return found


@contextlib.contextmanager
def prometheus(
    application: str, folder: Path, change: Callable[[str], str] = lambda rules: rules, key: str = ""
) -> Iterator[Prometheus]:
    """Run Prometheus with the settings of configs/observability; only addresses and times differ.

    Args:
        application: its URL.
        change: applied to the rules.
        key: scraper key of the application; empty for none.
    """
    binary = program("prometheus")
    settings = (OBSERVABILITY / "prometheus.yaml").read_text()
    config = yaml.safe_load(settings.replace("127.0.0.1:8000", application.removeprefix("http://")))
    config["global"] = {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL}
    for job in config["scrape_configs"]:
        for discovery in job.get("http_sd_configs", ()):
            discovery["refresh_interval"] = _INTERVAL
        if key:
            (folder / "key").write_text(key)
            for place in (job, *job.get("http_sd_configs", ())):
                place["authorization"] = {"credentials_file": str(folder / "key")}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yaml").write_text(change((OBSERVABILITY / "alerts.yaml").read_text()))
    address = f"127.0.0.1:{free_port()}"
    command = (
        binary,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    )
    log = folder / "prometheus.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            found = Prometheus(f"http://{address}")
            wait_for(lambda: httpx.get(f"{found.url}/-/ready").status_code == 200, 30, log.read_text)
            yield found
        finally:
            process.terminate()
            process.wait(20)


def rules() -> list[dict[str, Any]]:
    """Return the alerts as written."""
    (group,) = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])
