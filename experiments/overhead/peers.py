"""Systems that only this project has: the application with all features on, and a forwarder in Python."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from experiments.common.application import serve_config, served_application
from experiments.common.light_endpoint import MODEL
from experiments.common.peers import Endpoints, System, next_port, proxy_system
from experiments.common.processes import CpuMeter, role_of, started_program
from experiments.overhead.client import key_of
from experiments.overhead.system import DIRECT, OURS

FORWARDER = "forwarder, parsed"

_ROOT = Path(__file__).resolve().parents[2]
# Other processes may keep the machine busy.
_START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def started_direct(endpoints: Endpoints) -> Iterator[System]:
    """Connect to the engines directly."""
    yield System(DIRECT, endpoints.urls[1], CpuMeter(()))


@contextlib.contextmanager
def started_ours(endpoints: Endpoints) -> Iterator[System]:
    """Start the application with two pools of one light engine each."""
    with started_application(OURS, application(remote_model(endpoints))) as system:
        yield system


@contextlib.contextmanager
def started_application(
    name: str, config: Mapping[str, Any], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[System]:
    """Start an application, as a system of this name."""
    with served_application(config, environment=environment, start_timeout_s=_START_TIMEOUT_S) as served:
        yield System(name, served.url, CpuMeter((served.pid,), _role))


def application(model: Mapping[str, Any], tenants: int = 1) -> dict[str, Any]:
    """Return the configuration of `serve run` for a model: with keys; everything else is on by default."""
    keys = [{"tenant": f"bench-{number}", "key": key_of(number)} for number in range(tenants)]
    return serve_config("overhead", {"models": [model], "gateway": {"keys": keys}})


def remote_model(endpoints: Endpoints) -> dict[str, Any]:
    """Return a model with a short and a long pool of running engines."""
    pools = [
        {"name": name, "engine": {"remote": {"endpoints": [url]}}}
        for name, url in zip(("short", "long"), endpoints.urls, strict=True)
    ]
    return {"name": MODEL, "pools": pools}


def _role(process: psutil.Process) -> str:
    # The application has no engine: the replica of a pool reads the load of its endpoints.
    role = role_of(process)
    return "watcher" if role == "engine" else role


@contextlib.contextmanager
def started_forwarder(endpoints: Endpoints) -> Iterator[System]:
    """Start the program `forwarder`."""
    port = next_port()
    command = [sys.executable, str(_ROOT / "experiments/overhead/forwarder.py"), str(port)]
    with started_program([*command, *map(str, endpoints.ports)], port) as pid:
        yield proxy_system(FORWARDER, pid, port, f"Python {sys.version.partition(' ')[0]}")
