"""Comparable systems: nginx, routers written in Rust, and a minimal forwarder in Python."""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.common.processes import CpuMeter, started_program
from experiments.overhead.system import HOST, Endpoints, System, next_port

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
