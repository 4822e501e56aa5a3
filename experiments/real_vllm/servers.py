"""vLLM servers whose executor takes the times of a profile, and the systems in front of them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from experiments.common.application import inherited_environment, served_application
from experiments.common.errors import ExperimentError
from experiments.common.peers import (
    HOST,
    REMEDIES,
    Endpoints,
    System,
    missing_program,
    next_port,
    started_nginx,
    started_router,
)
from experiments.common.processes import CpuMeter
from experiments.real_vllm.client import MODEL, Ask
from experiments.real_vllm.scenes import FLOORS
from serve_app.cli.serve.command import ListenAddress, Servers, configuration, discover_servers
from serve_app.engines.model.roofline import load_profile, save_profile
from serve_app.engines.vllm.engine import VllmEngineSettings

ALTERNATES = "alternates"
"""No gateway: the client sends to each server in turn."""
# Nearly all of it is imports, which take long on a busy machine.
_START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 20.0
_IDLE_TIMEOUT_S = 120.0
_SERVED, _PROBES = "request_success_total", 8


class TimedServer:
    """A vLLM server, in a session of its own.

    Args:
        folder: the model's configuration and tokenizer.
        profile: name or path.
        log: receives its output.
    """

    def __init__(self, folder: Path, profile: str, log: Path) -> None:
        self.port = next_port()
        self._log = log
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--served-model-name", MODEL, "--host", HOST, "--port", str(self.port)),
            "--enable-prompt-tokens-details",
        ]
        for name, value in VllmEngineSettings(model=str(folder), timed=profile).arguments().items():
            text = value if isinstance(value, str) else json.dumps(value)
            self._command += [f"--{name.replace('_', '-')}", text]
        self._process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        environment = {**inherited_environment(), "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self._log.open("ab") as log:
            # The arguments are our own.
            return subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """PID of the API server, the parent of the engine's process."""
        return self._process.pid

    def wait_until_healthy(self) -> None:
        """Wait for the end of its start.

        Raises:
            ExperimentError: it ended, or the start takes too long; the message has its last output.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _fetched(self.port, "/health") is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(encoding="utf-8", errors="replace")[-2_000:]
                raise ExperimentError(f"a vLLM server did not start: {tail}")
            time.sleep(0.5)

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            if time.monotonic() > deadline:
                raise ExperimentError(f"the vLLM server on port {self.port} still has requests")
            time.sleep(0.2)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return metric_of(_fetched(self.port, "/metrics") or "", name)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def restart(self) -> None:
        """Replace its processes, whatever state they are in."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._process = self._started()
        self.wait_until_healthy()

    def end(self) -> None:
        """Stop it."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self.signal(signal.SIGKILL)
        self._process.wait()


def _fetched(port: int, path: str) -> str | None:
    """Return the body of a path, or None if the server does not answer with status 200."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
    except (OSError, urllib.error.HTTPError):
        return None
    return text


def metric_of(text: str, name: str) -> float:
    """Return the sum of one of vLLM's metrics over its labels."""
    return sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))


@contextlib.contextmanager
def started_servers(folder: Path, profiles: Sequence[str]) -> Iterator[list[TimedServer]]:
    """Start a server for each profile; they end with the block."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for number, profile in enumerate(profiles):
            servers.append(TimedServer(folder, profile, place / f"{number}.log"))
            stack.callback(servers[-1].end)
        for server in servers:
            server.wait_until_healthy()
        yield servers


@contextlib.contextmanager
def slower_profile(name: str, factor: float) -> Iterator[str]:
    """Write a profile whose iterations take `factor` times as long; yield its path."""
    profile = load_profile(name)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "slow.yaml"
        slow = replace(profile, step_time=profile.step_time.scaled(factor))
        save_profile(slow, path, source=f"{name}, {factor:g} times as slow")
        yield str(path)


# Systems


@contextlib.contextmanager
def _no_system(endpoints: Endpoints) -> Iterator[System]:
    yield System(ALTERNATES, endpoints.urls[0], CpuMeter(()))


@contextlib.contextmanager
def _ours(endpoints: Endpoints, floors: Mapping[str, float] | None = None) -> Iterator[System]:
    """Start the application as `ewsjf serve --endpoints` does, with floors if there are any."""
    servers = Servers(found=discover_servers(endpoints.urls, None))
    text = configuration(servers, ListenAddress(host=HOST, port=0, start=""))
    document = yaml.safe_load(text)
    if floors is not None:
        (application,) = document["applications"]
        application["args"]["models"][0]["scheduler"] = {"floors": {"tenants": dict(floors)}}
    with served_application(document, start_timeout_s=_START_TIMEOUT_S) as served:
        yield System("ours", served.url, CpuMeter((served.pid,)))


STARTED: Mapping[str, Callable[[Endpoints], AbstractContextManager[System]]] = {
    ALTERNATES: _no_system,
    "nginx": partial(started_nginx, method="least_conn;"),
    "smg": lambda endpoints: started_router("smg", endpoints, "--policy", "cache_aware"),
    "smg least_load": lambda endpoints: started_router("smg", endpoints, "--policy", "least_load"),
    "vllm-router": lambda endpoints: started_router("vllm-router", endpoints, "--policy", "cache_aware"),
    "ours": _ours,
    "ours, floors": partial(_ours, floors=FLOORS),
}
"""The systems, by name."""


def missing(system: str) -> str:
    """Return why a system cannot be started; empty if it can."""
    program = system.partition(" ")[0]
    return missing_program(program, REMEDIES[program]) if program in REMEDIES else ""


@contextlib.contextmanager
def started(name: str, servers: Sequence[TimedServer]) -> Iterator[tuple[System, Sequence[str]]]:
    """Start a system; yield it with the URLs that the client uses in turn, once it uses all servers."""
    endpoints = Endpoints([one.port for one in servers])
    with STARTED[name](endpoints) as system:
        urls = endpoints.urls if name == ALTERNATES else [system.url]
        before = [one.metric(_SERVED) for one in servers]
        deadline = time.monotonic() + _IDLE_TIMEOUT_S
        # Routers discover servers one after another, and serve the first requests with a part of them.
        while any(one.metric(_SERVED) == count for one, count in zip(servers, before, strict=True)):
            if time.monotonic() > deadline:
                raise ExperimentError(f"{name} does not use all servers")
            with ThreadPoolExecutor(_PROBES) as threads:
                list(threads.map(_probe, (urls[number % len(urls)] for number in range(_PROBES))))
        yield replace(system, name=name), urls


def _probe(url: str) -> None:
    messages = [{"role": "user", "content": f"{uuid.uuid4()} is new."}]
    ask = Ask(kind="", messages=messages, output_tokens=20)
    request = urllib.request.Request(f"{url}/v1/chat/completions", ask.body(), ask.headers())  # noqa: S310 - our own
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - see above
            answer.read()
    except OSError:
        time.sleep(0.2)
