"""Ray cluster of several nodes on this machine: each is a separate `ray start` that can die alone."""

import contextlib
import json
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from experiments.common.application import Application, free_ports, inherited_environment
from experiments.common.errors import ExperimentError
from experiments.common.processes import titled
from serve_app.cli.serve.instance import environment, instance_folder
from serve_app.serving.access import ADMIN_KEY_VARIABLE, raise_descriptor_limit, write_admin_key

HEAD = "head"
_ROOT = Path(__file__).resolve().parents[2]
_STARTED = "Ray runtime started"
_START_TIMEOUT_S = 240.0
_END_TIMEOUT_S = 60.0
_POLL_S = 0.1
_OBJECT_STORE_BYTES = 100 * 2**20
_TAIL_CHARACTERS = 3_000
_GCS_SERVER, _RAYLET = "gcs_server", "raylet"
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Specification of a node.

    Attributes:
        name: short, because socket paths contain it.
        resources: custom ones, which bind pools to nodes.
    """

    name: str
    num_cpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RunningNode:
    """One start of a node.

    Attributes:
        keeper: the ancestor of the node's processes.
        url: of the gateways on it.
    """

    spec: NodeSpec
    keeper: "subprocess.Popen[bytes]"
    url: str
    output: Path
    halted: bool = False

    def processes(self, name: str | None = None) -> list[psutil.Process]:
        """Return its processes except the keeper, optionally only those of this name."""
        try:
            family = psutil.Process(self.keeper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [one for one in family if _is_running(one, name)]

    @property
    def is_up(self) -> bool:
        """Return whether it runs and was not halted."""
        return self.keeper.poll() is None and not self.halted

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self.keeper.poll() is None and time.monotonic() < deadline:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.keeper.wait(_POLL_S)
        if self.keeper.poll() is None:
            raise ExperimentError(f"node {self.spec.name} does not end: {self.processes()}")

    def halt(self) -> None:
        """Stop it and leave its connections open without notice, as a network failure does."""
        self.halted = True
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()


class NodeCluster:
    """Nodes that can be killed and restarted; a context manager that leaves no process behind.

    Args:
        workers: besides the head, which has no cores and runs Serve's controller and perhaps a gateway.
        environment: additional variables of all nodes, such as the store of Ray's control service.
    """

    def __init__(
        self,
        workers: Sequence[NodeSpec],
        environment: Mapping[str, str] = MappingProxyType({}),
        head_options: Sequence[str] = (),
    ) -> None:
        self._specs = {spec.name: spec for spec in (NodeSpec(HEAD), *workers)}
        self._ports = free_ports()
        self.gcs_port = next(self._ports)
        self._urls_port = {name: next(self._ports) for name in self._specs}
        self.folder = instance_folder(self.gcs_port)
        self._given = {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._head_options = tuple(head_options)
        self._starts = 0
        self.nodes: dict[str, RunningNode] = {}

    @property
    def address(self) -> str:
        """Return the address of Ray's control service."""
        return f"127.0.0.1:{self.gcs_port}"

    def __enter__(self) -> "NodeCluster":
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._given[ADMIN_KEY_VARIABLE] = write_admin_key(self.folder)
        raise_descriptor_limit()
        try:
            self.start(HEAD)
            self.start(*(name for name in self._specs if name != HEAD))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *names: str) -> None:
        """Start nodes, or restart them after their death; their data on disk is lost.

        A failing start is repeated some times, as a supervisor does: Ray itself gives up after fifteen
        seconds without its agents, which a busy machine may need.

        Raises:
            ExperimentError: a node does not start; the message has its last log lines.
        """
        for left in reversed(range(_ATTEMPTS)):
            for name in names:
                if name in self.nodes:
                    self.nodes[name].kill()
                self.nodes[name] = self._begin(name)
            names = tuple(name for name in names if not _has_started(self.nodes[name], last=not left))

    def kill(self, name: str) -> None:
        """End every process of a node at once."""
        self.nodes[name].kill()

    def kill_control_service(self) -> None:
        """End only the head's `gcs_server`."""
        (server,) = self.nodes[HEAD].processes(_GCS_SERVER)
        server.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """End all nodes; their logs stay until the next cluster uses the port."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(RunningNode.kill, self.nodes.values()))

    def replicas(self, deployment: str) -> dict[int, str]:
        """Return the nodes of a deployment's replicas, by process; halted nodes have none.

        Args:
            deployment: the beginning of `APPLICATION:DEPLOYMENT`.
        """
        found = {}
        for name, node in self.nodes.items():
            if node.is_up:
                for process, _ in titled(node.keeper.pid, f"ray::ServeReplica:{deployment}"):
                    found[process.pid] = name
        return found

    def application(self, name: str, node: str = HEAD) -> Application:
        """Return an application as seen through one node's address."""
        running = self.nodes[node]
        return Application(name, running.keeper.pid, running.url, self.folder)

    def log_lines(self, application: str, deployment: str) -> list[str]:
        """Return the log lines of a deployment's replicas so far, including those of dead nodes."""
        logs = self.folder.glob(f"*/session_2*/logs/serve/replica_{application}_{deployment}*.log")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a node; its ports are unique, because all nodes share an address."""
        port = self._urls_port[name]
        given = environment({**inherited_environment(), **self._given})
        return {**given, "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(port)}

    @property
    def head_port(self) -> int:
        """Return the HTTP port of the head, which the application's configuration names."""
        return self._urls_port[HEAD]

    def _begin(self, name: str) -> RunningNode:
        self._starts += 1
        folder = self.folder / f"{name}{self._starts}"
        folder.mkdir()
        output = folder / "start.log"
        port = self._urls_port[name]
        with output.open("w") as console:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "experiments.common.node_keeper", *self._command(name, folder)],
                cwd=_ROOT,
                env=self.environment(name),
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        return RunningNode(self._specs[name], keeper, f"http://127.0.0.1:{port}", output)

    def _command(self, name: str, folder: Path) -> list[str]:
        spec = self._specs[name]
        options: dict[str, Any] = {
            # Any free ports: the usual range would contain those chosen here.
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": spec.num_cpus,
            "num-gpus": 0,
            "resources": json.dumps(dict(spec.resources)),
            "object-store-memory": _OBJECT_STORE_BYTES,
            "temp-dir": folder,
            "dashboard-agent-listen-port": next(self._ports),
            "include-log-monitor": False,
        }
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        if name == HEAD:
            options |= {
                "port": self.gcs_port,
                "include-dashboard": False,
                "ray-client-server-port": next(self._ports),
            }
            ray += ["--head", *self._head_options]
        else:
            options["address"] = self.address
        return [*ray, *(f"--{key}={value}" for key, value in options.items())]


def _is_running(process: psutil.Process, name: str | None) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and name in {None, process.name()}
    return False


def _has_started(node: RunningNode, *, last: bool) -> bool:
    """Wait until it has started, or cannot any more.

    Raises:
        ExperimentError: it was the last attempt.
    """
    deadline, had_raylet = time.monotonic() + _START_TIMEOUT_S, False
    while time.monotonic() < deadline:
        has_raylet = bool(node.processes(_RAYLET))
        text = node.output.read_text(encoding="utf-8", errors="replace")
        if _STARTED in text:
            return True
        # `ray start` keeps waiting for a raylet that has ended.
        if node.keeper.poll() is not None or (had_raylet and not has_raylet):
            break
        had_raylet = had_raylet or has_raylet
        time.sleep(_POLL_S)
    node.kill()
    if last:
        raise ExperimentError(f"node {node.spec.name} did not start:\n{text[-_TAIL_CHARACTERS:]}")
    return False
