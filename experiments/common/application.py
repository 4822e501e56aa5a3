"""Served application: `ewsjf serve` on a free port, started and stopped here."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml

from experiments.common.errors import ExperimentError
from experiments.common.processes import process_tree
from serve_app.cli.serve.instance import instance_folder
from serve_app.serving.access import read_admin_key
from serve_app.settings.checking import NO_PROXY

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 30.0
# The console of `serve` reports with this text that everything runs.
_READY = "Ready after "
# Distance of the ports that processes with neighbouring PIDs try first.
_APART = 101
_TAIL_CHARACTERS = 2_000
# Gateways of applications use higher ports.
_PORTS = range(17_000, 20_000)
# Applications that start at the same time do not listen yet.
_CHOSEN: set[int] = set()
_CHOOSING = threading.Lock()
# A busy machine takes longer than the 30 s that Ray allows its own processes.
_LONG_START = MappingProxyType({"RAY_raylet_start_wait_time_s": "120"})
_ONE_GATEWAY = MappingProxyType({"replicas": 1, "num_cpus": 0.2})


@dataclass(frozen=True, slots=True)
class Application:
    """A running application.

    Attributes:
        name: name of the application in Ray Serve.
        pid: PID of its supervisor, the ancestor of Ray's processes.
        folder: Ray's files for it; removed when the next application uses its port.
    """

    name: str
    pid: int
    url: str
    folder: Path

    def fetched(self, path: str) -> str:
        """Return the body of a path, requested as an admin."""
        request = urllib.request.Request(f"{self.url}{path}", headers=self.admin_headers())  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - see above
            text: str = answer.read().decode("utf-8", "replace")
        return text

    def status(self) -> dict[str, Any]:
        """Return the status of the only model's scheduler; empty while it does not answer."""
        try:
            document: dict[str, Any] = json.loads(self.fetched("/debug/status"))["models"][0]
        except (OSError, ValueError, KeyError, IndexError):
            return {}
        return document if "replicas" in document else {}

    def admin_headers(self) -> dict[str, str]:
        """Return admin request headers; empty before the application starts."""
        key = read_admin_key(self.folder)
        return {"authorization": f"Bearer {key}"} if key else {}

    def log_lines(self, deployment: str) -> list[str]:
        """Return the log lines of a deployment's replicas so far."""
        logs = self.folder.glob(f"ray/session_latest/logs/serve/replica_{self.name}_{deployment}*.log")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]


def is_whole(status: Mapping[str, Any], replicas: int, gateways: int) -> bool:
    """Return whether a scheduler knows all gateways, and has fresh reports of all replicas."""
    if not status:
        return False
    fresh = sum(bool(each["report"]) and not each["stale"] for each in status["replicas"].values())
    return fresh == replicas and status["gateways"] == gateways


@contextlib.contextmanager
def served_application(
    config: Mapping[str, Any],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    start_timeout_s: float = _START_TIMEOUT_S,
) -> Iterator[Application]:
    """Serve the application of a configuration on a free port; yield once it accepts requests.

    Args:
        config: of `serve run`, with one application.
        environment: additional variables of its processes.

    Raises:
        ExperimentError: it does not start; the message ends with the last lines of its logs.
    """
    port = free_port()
    folder = instance_folder(port)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        file = Path(place) / "serve.yaml"
        http_options = {**config["http_options"], "port": port}
        file.write_text(yaml.safe_dump({**config, "http_options": http_options}), encoding="utf-8")
        output = Path(place) / "console.log"
        with output.open("w") as console:
            # The arguments are our own.
            process = subprocess.Popen(
                [sys.executable, "-m", "serve_app", "serve", str(file)],
                cwd=_ROOT,
                env={**inherited_environment(), **_LONG_START, **environment},
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        name = config["applications"][0]["name"]
        served = Application(name, process.pid, f"http://127.0.0.1:{port}", folder)
        try:
            _wait_until_ready(served, process, output, start_timeout_s)
            yield served
        finally:
            _end(process)


def serve_config(
    name: str,
    args: Mapping[str, Any],
    *,
    import_path: str = "serve_app.app:build_app",
    port: int = 0,
) -> dict[str, Any]:
    """Return the configuration of `serve run` for an application.

    Args:
        args: of the application; without `gateways` it gets one, with few of the machine's cores.
    """
    return {
        "proxy_location": NO_PROXY,
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": name,
                "route_prefix": "/",
                "import_path": import_path,
                "args": {"gateways": dict(_ONE_GATEWAY), **args},
            }
        ],
    }


def emulated_pool(
    name: str, replicas: int = 1, *, resources: Mapping[str, Any], **engine: Any
) -> dict[str, Any]:
    """Return a pool of emulated engines of the laptop's profile, with these further settings."""
    engines = {"emulated": {"profile": "laptop", **engine}}
    return {"name": name, "engine": engines, "replicas": replicas, "resources": dict(resources)}


def free_port() -> int:
    """Return a port that is free now, below the kernel's ephemeral ports; another one each time."""
    with _CHOOSING:
        for port in free_ports():
            if port not in _CHOSEN:
                _CHOSEN.add(port)
                return port
    raise ExperimentError(f"no free port between {_PORTS.start:,} and {_PORTS.stop:,}")


def free_ports() -> Iterator[int]:
    """Yield one port after another as `free_port` does."""
    # Processes that start together have neighbouring PIDs, and their children may listen only later.
    first = _PORTS.start + os.getpid() * _APART % (len(_PORTS) // 2)
    return (port for port in range(first, _PORTS.stop) if is_free(port))


def is_free(port: int) -> bool:
    """Return whether a port of this machine is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, without another cluster, in which the checkout can be imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**inherited, "PYTHONPATH": path}


def _wait_until_ready(
    served: Application, process: "subprocess.Popen[bytes]", output: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ExperimentError(
                f"it ended with status {process.returncode}:\n{_tail(output, served.folder)}"
            )
        # The first gateway may answer while others still start, and `serve` treats a death in a start as
        # failure.
        if _READY in output.read_text(encoding="utf-8", errors="replace"):
            with contextlib.suppress(OSError):
                served.fetched("/ready")
                return
        time.sleep(0.5)
    raise ExperimentError(
        f"{served.url} was not ready after {timeout_s:.0f} s:\n{_tail(output, served.folder)}"
    )


def _tail(output: Path, folder: Path) -> str:
    """Return the last lines of the logs that explain a failed start."""
    logs = (output, *folder.glob("*.log"), *folder.glob("ray/session_latest/logs/serve/*.log"))
    return "\n".join(
        f"--- {log.name}\n{log.read_text(encoding='utf-8', errors='replace')[-_TAIL_CHARACTERS:]}"
        for log in logs
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop it and its Ray cluster; after a while, kill what is left."""
    family = process_tree(process.pid)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline and (process.poll() is None or any(one.is_running() for one in family)):
        time.sleep(0.2)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
