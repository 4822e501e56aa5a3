"""Bursts of requests to several applications in turn, over open connections, with the CPU time of each.

On a shared machine the CPU time of a request varies by a half from second to second. Bursts of a few
milliseconds meet all applications alike, so that their differences are small beside it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil
import uvloop

from experiments.common.errors import ExperimentError
from experiments.common.peers import System
from experiments.common.processes import calibrate, cpu_s, process_tree
from experiments.overhead.client import Connection, Load, Run, load_of, parts_of
from experiments.overhead.system import RequestKind

ROLES = ("gateway", "scheduler")
# Work after an answer, such as its log line, its metrics and the export of its trace.
_SETTLE_S = 0.02
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Bursts:
    """Settings of the bursts of one kind.

    Attributes:
        requests: of one burst, by all clients together.
        cycles: bursts to each application in each block; a block gives one figure.
    """

    kind: RequestKind
    clients: int
    requests: int
    cycles: int
    blocks: int


def played(bursts: Bursts, systems: Sequence[System], idle_s: float) -> dict[str, dict[str, list[float]]]:
    """Return CPU milliseconds per request by system and role, one for each block.

    Args:
        idle_s: span in which idle use is measured; its mean over all systems is subtracted.
    """
    calibrate([system.meter for system in systems], idle_s)
    idle = {
        role: sum(system.meter.idle_per_s.get(role, 0.0) for system in systems) / len(systems)
        for role in ROLES
    }
    return uvloop.run(_played(bursts, systems, idle))


async def _played(
    bursts: Bursts, systems: Sequence[System], idle: Mapping[str, float]
) -> dict[str, dict[str, list[float]]]:
    targets = {system.name: _Target(load_of(bursts.kind, system, bursts.clients, 0.0)) for system in systems}
    processes = {system.name: _processes(system) for system in systems}
    for target in targets.values():
        await target.connect()
    found: dict[str, dict[str, list[float]]] = {name: {role: [] for role in ROLES} for name in targets}
    for block in range(bursts.blocks + 1):
        used = {name: dict.fromkeys(ROLES, 0.0) for name in targets}
        for _ in range(bursts.cycles):
            for name, target in targets.items():
                before, began = _read(processes[name]), time.monotonic()
                await target.send(bursts.requests)
                await asyncio.sleep(_SETTLE_S)
                seconds, after = time.monotonic() - began, _read(processes[name])
                for role in ROLES:
                    used[name][role] += after[role] - before[role] - idle[role] * seconds
        # The first block warms up.
        for name in targets if block else ():
            for role in ROLES:
                found[name][role].append(1_000 * used[name][role] / bursts.cycles / bursts.requests)
    for target in targets.values():
        target.close()
    return found


def _processes(system: System) -> dict[str, list[psutil.Process]]:
    family = [process for root in system.meter.roots for process in process_tree(root)]
    return {role: [one for one in family if system.meter.role_of(one) == role] for role in ROLES}


def _read(processes: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    return {role: cpu_s(each) for role, each in processes.items()}


class _Target:
    """Open connections to one application."""

    def __init__(self, load: Load) -> None:
        self._run = Run(load, *parts_of(load), time.perf_counter() + 86_400.0, asyncio.Event())
        self._connections: list[_BurstConnection] = []
        self._left = 0
        self._unsent = 0
        self._ended = asyncio.Event()

    async def connect(self) -> None:
        target = urlsplit(self._run.load.url)
        assert target.hostname is not None
        assert target.port is not None
        loop = asyncio.get_running_loop()
        for _ in range(self._run.load.clients):
            _, connection = await loop.create_connection(
                lambda: _BurstConnection(self._run, self._on_end), target.hostname, target.port
            )
            self._connections.append(connection)

    async def send(self, requests: int) -> None:
        """Send requests, each connection one after another, and wait for all answers.

        Raises:
            ExperimentError: an answer was wrong, or is missing.
        """
        self._left = requests
        self._unsent = requests - len(self._connections)
        self._ended.clear()
        for connection in self._connections[:requests]:
            connection.send()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            self._run.error = self._run.error or f"{self._left} answers are missing after {_TIMEOUT_S:.0f} s"
        if self._run.error:
            raise ExperimentError(f"{self._run.load.url}: {self._run.error}")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _on_end(self, connection: "_BurstConnection") -> None:
        self._left -= 1
        if self._run.error or not self._left:
            self._ended.set()
        elif self._unsent > 0:
            self._unsent -= 1
            connection.send()


class _BurstConnection(Connection):
    """Connection whose owner decides after each answer whether it sends the next request."""

    def __init__(self, run: Run, on_end: Callable[["_BurstConnection"], None]) -> None:
        super().__init__(run)
        self._on_end = on_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # it can write

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_end(self)

    def proceed(self, now: float) -> None:  # noqa: ARG002 - as the base class
        self._on_end(self)
