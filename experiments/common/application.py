"""A served application: `serve run` with its own Ray cluster and ports, started and ended here."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from experiments.common.processes import is_alive, process_tree
from serve_app.bench.connection import BenchError

BUILD_APP = "serve_app.app:build_app"
_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 30.0
_TAIL_CHARACTERS = 2_000
_ONE_GATEWAY = MappingProxyType({"replicas": 1, "num_cpus": 0.2})


@dataclass(frozen=True, slots=True)
class Application:
    """An application that takes requests.

    Attributes:
        name: of the application, as Ray Serve knows it.
        pid: of `serve run`; the processes of Ray descend from it.
        folder: where Ray keeps what belongs to it; removed at the end.
    """

    name: str
    pid: int
    url: str
    folder: Path

    def fetched(self, path: str, *, post: bool = False) -> str:
        """The body under a path."""
        request = urllib.request.Request(f"{self.url}{path}", method="POST" if post else "GET")  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - see above
            text: str = answer.read().decode("utf-8", "replace")
        return text

    def log_lines(self, deployment: str) -> list[str]:
        """What the replicas of a deployment have logged so far."""
        logs = self.folder.glob(f"ray/session_latest/logs/serve/replica_{self.name}_{deployment}*.log")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]


def started_application(
    name: str, models: Sequence[Mapping[str, Any]], import_path: str = BUILD_APP
) -> contextlib.AbstractContextManager[Application]:
    """Serve models behind one gateway, with few of the machine's cores reserved; see `served_application`."""
    return served_application(serve_config(name, models, import_path, 0))


@contextlib.contextmanager
def served_application(
    config: Mapping[str, Any],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    start_timeout_s: float = _START_TIMEOUT_S,
) -> Iterator[Application]:
    """Serve the application of a configuration on a free port; yields once requests are taken.

    Args:
        config: of `serve run`, with one application.
        environment: further variables of its processes.

    Raises:
        BenchError: it does not start; the message ends with the last lines of its logs.
    """
    # A short path: Ray's sockets lie under it, and their names are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ov", dir="/tmp", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        ports = _free_ports(6)
        file = folder / "serve.yaml"
        http_options = {**config["http_options"], "port": ports[0]}
        file.write_text(yaml.safe_dump({**config, "http_options": http_options}), encoding="utf-8")
        with (folder / "serve.log").open("w") as output:
            # The arguments are our own.
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("serve")), "run", str(file)],
                cwd=_ROOT,
                env={**_environment(place, ports), **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        name = config["applications"][0]["name"]
        served = Application(name, process.pid, f"http://127.0.0.1:{ports[0]}", folder)
        try:
            _wait_until_ready(served, process, start_timeout_s)
            yield served
        finally:
            _end(process)


def serve_config(
    name: str,
    models: Sequence[Mapping[str, Any]],
    import_path: str,
    port: int,
    gateways: Mapping[str, Any] = _ONE_GATEWAY,
) -> dict[str, Any]:
    """The configuration of `serve run` for some models."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": name,
                "route_prefix": "/",
                "import_path": import_path,
                "args": {"models": list(models), "gateways": dict(gateways)},
            }
        ],
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that the kernel gives out by itself."""
    found: list[int] = []
    for port in range(18_000 + os.getpid() % 4_000, 30_000, 7):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise BenchError("no free ports between 18,000 and 30,000")


def _environment(folder: str, ports: Sequence[int]) -> dict[str, str]:
    """What `scripts/serve` sets, and places and ports of its own for all that two clusters would share."""
    lines = (_ROOT / "scripts" / "serve.env").read_text(encoding="utf-8").splitlines()
    defaults = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {
        **defaults,
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
        "RAY_TMPDIR": folder,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/haproxy",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/haproxy/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[3]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[4]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[5]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[5] + 200),
        # A busy machine takes longer than the 30 s that Ray allows its own processes.
        "RAY_raylet_start_wait_time_s": "120",
        # Nobody is connected that would have to be waited for when an experiment is over.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _wait_until_ready(served: Application, process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"serve run ended with status {process.returncode}:\n{_tail(served.folder)}")
        with contextlib.suppress(OSError):
            served.fetched("/ready")
            return
        time.sleep(0.5)
    raise BenchError(f"{served.url} was not ready after {timeout_s:.0f} s:\n{_tail(served.folder)}")


def _tail(folder: Path) -> str:
    """The ends of the logs that state why an application did not start."""
    logs = (folder / "serve.log", *folder.glob("ray/session_latest/logs/serve/*.log"))
    return "\n".join(
        f"--- {log.name}\n{log.read_text(encoding='utf-8', errors='replace')[-_TAIL_CHARACTERS:]}"
        for log in logs
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask `serve run` to end, which ends its Ray cluster; what is left of that after a while is killed."""
    family = process_tree(process.pid)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline and (process.poll() is None or any(is_alive(one) for one in family)):
        time.sleep(0.2)
    for one in family:
        if is_alive(one):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    process.wait()
