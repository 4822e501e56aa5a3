"""An application for an experiment: `serve run` with its own Ray cluster, started and ended here."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from experiments.common.processes import is_alive, process_tree
from serve_app.bench.connection import BenchError

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 30.0


@contextlib.contextmanager
def started_application(config: Path, log: Path) -> Iterator[tuple[int, str]]:
    """Serve a configuration; yields the process id of `serve run` and the URL, once requests are taken.

    Args:
        config: its `http_options.port` must be free.
        log: where the output of `serve run` goes.

    Raises:
        BenchError: it does not start.
    """
    url = f"http://127.0.0.1:{yaml.safe_load(config.read_text(encoding='utf-8'))['http_options']['port']}"
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    # A short path: Ray's sockets lie under it, and their names are limited to 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="ov", dir="/tmp", ignore_cleanup_errors=True) as folder,
        log.open("w") as output,
    ):
        # The arguments are our own.
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=_environment(folder),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_until_served(url, process)
            yield process.pid, url
        finally:
            _end(process)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _environment(folder: str) -> dict[str, str]:
    """What `scripts/serve` sets, and places of its own for all that Ray and HAProxy keep in /tmp."""
    lines = (_ROOT / "scripts" / "serve.env").read_text(encoding="utf-8").splitlines()
    defaults = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    own = {
        "RAY_TMPDIR": folder,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/haproxy",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": "9191",
        "RAY_SERVE_HAPROXY_STATS_PORT": "8494",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**defaults, **inherited, **own}


def _wait_until_served(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"serve run ended with status {process.returncode}: read its log")
        # The URL is our own.
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):  # noqa: S310
            return
        time.sleep(0.5)
    raise BenchError(f"{url} was not ready after {_START_TIMEOUT_S:.0f} s: read the log of serve run")


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
