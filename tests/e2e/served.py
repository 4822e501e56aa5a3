"""Served application with its own processes and ports, for end-to-end tests."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from experiments.common.application import Application, serve_config, served_application
from experiments.common.errors import ExperimentError

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 200.0

# Dozens of requests suffice to learn; the defaults need hundreds.
LEARN_FROM = 40

# Two gateways and two short replicas, so that tests may kill one of each. At 4 ms per step, an answer of
# 1,500 tokens takes six seconds: long enough to interrupt it.
ARGS = {
    "models": [
        {
            "name": "demo",
            "aliases": ["demo-alias"],
            "pools": [
                {
                    "name": "short",
                    "engine": {"emulated": {"profile": "laptop", "max_model_len": 2048}},
                    "replicas": 2,
                    "resources": {"num_cpus": 0.1},
                    "drain_timeout_s": 10.0,
                },
                {
                    "name": "long",
                    "engine": {"emulated": {"profile": "laptop", "max_model_len": 8192}},
                    "resources": {"num_cpus": 0.1},
                    "drain_timeout_s": 10.0,
                },
            ],
            "scheduler": {
                "policy": "ewsjf",
                "routing": {"b_short_tokens": 2000},
                "max_waiting": 300,
            },
            "tuner": {
                "profile": "laptop",
                # Never searches: a search would take CPU time from other tests.
                "advanced": {"learn_from": LEARN_FROM, "min_requests": 1_000_000},
            },
        }
    ],
    "gateway": {"cors": {"allow_origins": ["https://chat.example.com"]}},
    "gateways": {"replicas": 2, "num_cpus": 0.1, "drain_timeout_s": 10.0},
}


@dataclass(frozen=True)
class Served:
    """A running application."""

    application: Application

    @property
    def url(self) -> str:
        """Return the URL of its gateways."""
        return self.application.url

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Return the processes of a deployment's replicas, by the beginning of its name."""
        found = []
        for process in psutil.Process(self.application.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:ewsjf:{deployment}"):
                    found.append(process)
        return found

    def log_lines(self, deployment: str) -> list[str]:
        """Return the log of a deployment's replicas, including those that have ended."""
        return self.application.log_lines(deployment)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, from any gateway."""
        return sum(value for found, value in self._samples(name) if labels.items() <= found.items())

    def pools(self) -> set[str]:
        """Return the pools with at least one joined replica."""
        return {labels["pool"] for labels, _ in self._samples("ewsjf_requests_in_flight")}

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the gateway has a replica of every model."""
        wait_for(lambda: self._get("/ready").status_code == 200, timeout_s, "/ready")

    def _samples(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        for family in text_string_to_metric_families(self._get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=10)


_RUNNING = pytest.StashKey[Served | Exception]()


def shared(config: pytest.Config) -> Served:
    """Return the application of the test session, started when first needed.

    A test that kills a part of it leaves the wait for recovery to the next test.
    """
    if _RUNNING not in config.stash:
        manager = serve(ARGS)
        try:
            config.stash[_RUNNING] = manager.__enter__()
            config.add_cleanup(partial(_leave, manager))
        except ExperimentError as exc:
            # No second attempt: a failing start takes minutes.
            config.stash[_RUNNING] = exc
    running = config.stash[_RUNNING]
    if isinstance(running, Exception):
        raise running
    return running


def _leave(manager: contextlib.AbstractContextManager[Served]) -> None:
    manager.__exit__(None, None, None)


def wait_for(
    condition: Callable[[], object], timeout_s: float, what: str | Callable[[], object] = "the condition"
) -> None:
    """Wait until the condition holds; an HTTP error counts as not yet.

    Args:
        what: the condition, for the message of the error, or what shows its state then.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        time.sleep(0.1)
    raise TimeoutError(f"{what() if callable(what) else what} was not true within {timeout_s:g} s")


def start_tuner(served: Served) -> None:
    """Send the requests after which the tuner starts, and wait until it has started."""
    body = {"model": "demo", "prompt": "hello", "max_tokens": 1}
    for _ in range(LEARN_FROM):
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
    wait_for(lambda: bool(served.replicas("tuner")), 60, "the tuner")


@contextlib.contextmanager
def serve(
    args: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Served]:
    """Serve an application with these settings; afterwards end all of its processes."""
    with served_application(
        serve_config("ewsjf", args),
        environment=environment or {},
        start_timeout_s=start_timeout_s,
    ) as application:
        yield Served(application)


def serve_config_of(served: Served, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that gives a running application these arguments."""
    return serve_config("ewsjf", args, port=int(served.url.rsplit(":", 1)[1]))
