"""Other systems between clients and servers, started here: nginx, and routers written in Rust."""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.application import is_free
from experiments.common.processes import CpuMeter, started_program

HOST = "127.0.0.1"
PROXY = "proxy"
"""Role of their processes."""
REMEDIES: Mapping[str, str] = {
    "nginx": "install the system's package",
    "smg": "scripts/setup peers",
    "vllm-router": "scripts/setup peers",
}
"""How to install each program."""

# The scripts of this environment, and Debian's folder of servers.
_PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"))
# Above the ports of applications, below the kernel's ephemeral ones, and different for parallel runs.
_PORTS = iter(range(21_000 + os.getpid() % 1_000 * 10, 32_000))
_NGINX = """
daemon off;
worker_processes auto;
pid {place}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {place}/bodies;
  proxy_temp_path {place}/proxy;
  fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi;
  scgi_temp_path {place}/scgi;
  client_max_body_size 0;
  keepalive_requests 100000000;
  upstream engines {{ {method}{servers} keepalive 128; keepalive_requests 100000000; }}
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


@dataclass(frozen=True, slots=True)
class System:
    """One system.

    Attributes:
        meter: of its processes; without any, clients connect to the engines directly.
        version: reported by the system.
        tenants: number of keys that requests use in turn.
        sessions: number of session ids that requests have in turn; 0 for requests without one.
    """

    name: str
    url: str
    meter: CpuMeter
    version: str = ""
    tenants: int = 1
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Servers behind the systems, on ports of this machine."""

    ports: Sequence[int]

    @property
    def urls(self) -> list[str]:
        """Return one URL for each."""
        return [f"http://{HOST}:{port}" for port in self.ports]


def next_port() -> int:
    """Return a free port, another one each time."""
    return next(port for port in _PORTS if is_free(port))


def missing_program(name: str, remedy: str) -> str:
    """Return why a program cannot be started on this machine; empty if it can."""
    return "" if shutil.which(name, path=_PATH) else f"there is no {name}: {remedy}"


@contextlib.contextmanager
def started_nginx(endpoints: Endpoints, method: str = "") -> Iterator[System]:
    """Start nginx, which forwards requests without buffering over kept-alive connections.

    Args:
        method: directive that selects the load balancing, such as `least_conn;`; by default it takes turns.
    """
    port = next_port()
    program = _program("nginx")
    with tempfile.TemporaryDirectory() as place:
        servers = "".join(f"server {HOST}:{one};" for one in endpoints.ports)
        config = _NGINX.format(place=place, method=method, servers=servers, host=HOST, port=port)
        file = Path(place) / "nginx.conf"
        file.write_text(config, encoding="utf-8")
        said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
        command = [program, "-p", place, "-c", str(file), "-e", f"{place}/error.log"]
        with started_program(command, port) as pid:
            yield proxy_system("nginx", pid, port, said.strip().rpartition("/")[2])


@contextlib.contextmanager
def started_router(name: str, endpoints: Endpoints, *options: str) -> Iterator[System]:
    """Start a router with its defaults, except for the request log and these options."""
    port, metrics = next_port(), next_port()
    command = [
        *([_program(name)] if name != "smg" else [_program(name), "launch"]),
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)),
        *("--worker-urls", *endpoints.urls),
        *("--log-level", "warn" if name == "smg" else "warning"),
        *(("--backend", "vllm") if name == "smg" else ()),
        *options,
    ]
    with started_program(command, port) as pid:
        yield proxy_system(name, pid, port, _version(name))


def proxy_system(name: str, pid: int, port: int, version: str) -> System:
    """Return a proxy that was started."""
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
