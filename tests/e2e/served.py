"""A served application in processes of its own, on ports of its own, for tests that need the whole of it."""

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 150.0

# Two gateways and two short replicas, so that one of each may die. At 4 ms a step, an answer of 1,500 tokens
# takes six seconds: long enough to be interrupted.
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
                "routing": {"b_short_tokens": 2000, "spill": True},
                "max_waiting": 300,
            },
            # Learns from dozens of requests, where production waits for hundreds.
            "tuner": {
                "advanced": {
                    "pull_interval_s": 0.5,
                    "strategic": {
                        "first_after": 40,
                        "drift_every": 40,
                        "drift_window": 60,
                        "drift": {"min_sample": 40},
                    },
                },
                # Watches, and never searches: that would take the CPU that other tests measure by.
                "parameters": {"profile": "laptop", "advanced": {"min_requests": 1_000_000}},
            },
        }
    ],
    "gateways": {"replicas": 2, "num_cpus": 0.1, "drain_timeout_s": 10.0},
}


@dataclass(frozen=True)
class Served:
    """A running application.

    Attributes:
        url: of its HTTP front end.
        process: `serve run`, the parent of every Ray process of the application.
        folder: where Ray keeps what belongs to it.
        started_in_s: from the command to the first request that it would have served.
    """

    url: str
    process: psutil.Popen
    folder: Path
    started_in_s: float = 0.0

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas, by the beginning of its name."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(f"ray::ServeReplica:ewsjf:{deployment}"):
                    found.append(process)
        return found

    def log_lines(self, deployment: str) -> list[str]:
        """What a deployment's replicas have logged, the dead ones included."""
        logs = self.folder.glob(f"ray/session_latest/logs/serve/replica_ewsjf_{deployment}*.log")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that bear the labels; from whichever gateway answers."""
        total = 0.0
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def pools(self) -> set[str]:
        """The pools of which a replica has joined."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text)
        return {
            sample.labels["pool"]
            for family in families
            for sample in family.samples
            if sample.name == "ewsjf_requests_in_flight"
        }

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Until every model has a replica, as the gateway sees it."""
        wait_for(self.is_ready, timeout_s, "/ready")

    def is_ready(self) -> bool:
        """Whether every model has a replica, as the gateway sees it."""
        return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200


_RUNNING = pytest.StashKey[Served | Exception]()


def shared(config: pytest.Config) -> Served:
    """The one application of a test session, started when first asked for.

    A test that kills a part of it leaves it to the next one to wait until that part is back.
    """
    if _RUNNING not in config.stash:
        manager = serve(ARGS)
        try:
            config.stash[_RUNNING] = manager.__enter__()
            config.add_cleanup(partial(_leave, manager))
        except RuntimeError as exc:
            # Once is enough to wait for a start that fails.
            config.stash[_RUNNING] = exc
    running = config.stash[_RUNNING]
    if isinstance(running, Exception):
        raise running
    return running


def _leave(manager: contextlib.AbstractContextManager[Served]) -> None:
    manager.__exit__(None, None, None)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Until the condition holds; an HTTP error counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not come true within {timeout_s:g} s")


@contextlib.contextmanager
def serve(
    args: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Served]:
    """Run an application with these settings, and end every process of it afterwards."""
    try:
        served = _started(args, environment or {}, start_timeout_s)
    except RayGaveUpError:
        # Ray allows its own processes half a minute, which a machine that is busy with other tests can take.
        served = _started(args, environment or {}, start_timeout_s)
    try:
        yield served
    finally:
        _end(served)


class RayGaveUpError(RuntimeError):
    """`serve run` ended by itself."""


def _started(args: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float) -> Served:
    # Short, because Ray puts sockets below it and their paths are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ewsjf-", dir="/tmp"))
    ports = _free_ports(6)
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(_serve_config(args, ports[0])))
    started_at = time.monotonic()
    with (folder / "serve.log").open("wb") as output:
        process = psutil.Popen(
            [str(Path(sys.executable).parent / "serve"), "run", str(config)],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env=_environment(folder, ports, environment),
        )
    served = Served(f"http://127.0.0.1:{ports[0]}", process, folder)
    try:
        _wait_for_start(served, timeout_s)
    except BaseException:
        _end(served)
        raise
    return replace(served, started_in_s=time.monotonic() - started_at)


def _wait_for_start(served: Served, timeout_s: float) -> None:
    def ended_or_ready() -> bool:
        return served.process.poll() is not None or served.is_ready()

    try:
        wait_for(ended_or_ready, timeout_s, "the start")
    except TimeoutError as exc:
        raise RuntimeError(f"the application did not start:\n{_tail(served.folder)}") from exc
    if served.process.poll() is not None:
        raise RayGaveUpError(f"serve run ended by itself:\n{_tail(served.folder)}")


def _serve_config(args: Mapping[str, Any], port: int) -> dict[str, Any]:
    application = {
        "name": "ewsjf",
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "args": dict(args),
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }


def _environment(folder: Path, ports: list[int], changes: Mapping[str, str]) -> dict[str, str]:
    """What scripts/serve sets, and every port and file that two clusters on one machine would share."""
    lines = (ROOT / "scripts" / "serve.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    haproxy = folder / "haproxy"
    return {
        **os.environ,
        **settings,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "RAY_TMPDIR": str(folder),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[3]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[4]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[5]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[5] + 200),
        **changes,
    }


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below the range from which the kernel gives out ports by itself."""
    found: list[int] = []
    for port in range(18_000 + os.getpid() % 4_000, 30_000, 7):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports between 18,000 and 30,000")


def _end(served: Served) -> None:
    """End `serve run` and its descendants, and nobody else."""
    with contextlib.suppress(psutil.Error):
        family = served.process.children(recursive=True)
        served.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([served.process, *family], timeout=20)
        for left in alive:
            with contextlib.suppress(psutil.Error):
                left.kill()
    served.process.wait(10)
    shutil.rmtree(served.folder, ignore_errors=True)


def _tail(folder: Path) -> str:
    """The ends of the logs that tell why it did not start."""
    logs = [folder / "serve.log", *folder.glob("ray/session_latest/logs/serve/*.log")]
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists()
    )
