"""The systems: the application with all features on, nginx, routers in Rust, and a forwarder in Python."""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from experiments.common.application import serve_config, served_application
from experiments.common.light_endpoint import MODEL
from experiments.common.processes import CpuMeter, role_of, started_program
from experiments.overhead.client import key_of
from experiments.overhead.system import DIRECT, HOST, OURS, Endpoints, System, next_port

PROXY, FORWARDER = "proxy", "forwarder, parsed"
"""Role of each of their processes, and the name of the forwarder."""

# The scripts of this environment, and Debian's folder of servers.
_PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"))
_ROOT = Path(__file__).resolve().parents[2]
_NGINX = """
daemon off;
worker_processes auto;
pid {place}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {place}/bodies;
  client_max_body_size 0;
  keepalive_requests 100000000;
  upstream engines {{ {servers} keepalive 128; keepalive_requests 100000000; }}
  server {{
    listen {host}:{port};
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"""


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


def missing_program(name: str, remedy: str) -> str:
    """Return why a program cannot be started on this machine; empty if it can."""
    return "" if shutil.which(name, path=_PATH) else f"there is no {name}: {remedy}"


@contextlib.contextmanager
def started_nginx(endpoints: Endpoints) -> Iterator[System]:
    """Start nginx, which forwards requests without buffering over kept-alive connections."""
    port = next_port()
    program = _program("nginx")
    with tempfile.TemporaryDirectory() as place:
        servers = "".join(f"server {HOST}:{one};" for one in endpoints.ports)
        config = _NGINX.format(place=place, servers=servers, host=HOST, port=port)
        file = Path(place) / "nginx.conf"
        file.write_text(config, encoding="utf-8")
        said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
        command = [program, "-p", place, "-c", str(file), "-e", f"{place}/error.log"]
        with started_program(command, port) as pid:
            yield _system("nginx", pid, port, said.strip().rpartition("/")[2])


@contextlib.contextmanager
def started_router(name: str, endpoints: Endpoints) -> Iterator[System]:
    """Start a router with its defaults, except for the request log and limits that bodies would exceed."""
    port, metrics = next_port(), next_port()
    command = [
        *([_program(name)] if name != "smg" else [_program(name), "launch"]),
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)),
        *("--worker-urls", *endpoints.urls),
        *("--log-level", "warn" if name == "smg" else "warning"),
        *(("--backend", "vllm") if name == "smg" else ()),
    ]
    with started_program(command, port) as pid:
        yield _system(name, pid, port, _version(name))


@contextlib.contextmanager
def started_forwarder(endpoints: Endpoints) -> Iterator[System]:
    """Start the program `forwarder`."""
    port = next_port()
    command = [sys.executable, str(_ROOT / "experiments/overhead/forwarder.py"), str(port)]
    with started_program([*command, *map(str, endpoints.ports)], port) as pid:
        yield _system(FORWARDER, pid, port, f"Python {sys.version.partition(' ')[0]}")


def _system(name: str, pid: int, port: int, version: str) -> System:
    return System(name, f"http://{HOST}:{port}", CpuMeter((pid,), lambda _: PROXY), version)


def _program(name: str) -> str:
    path = shutil.which(name, path=_PATH)
    assert path is not None, "a play leaves out what is missing"
    return path


def _version(name: str) -> str:
    """Return the version of the package in the program's environment."""
    folder = Path(_program(name)).resolve().parents[1]
    paths: Sequence[str] = [str(one) for one in folder.glob("lib/python*/site-packages")]
    found = importlib.metadata.distributions(name=name, path=list(paths))
    return next((one.version for one in found), "unknown")
