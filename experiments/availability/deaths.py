"""Deaths: parts of a served application are killed or halted under traffic.

There is one application for each kind of process, with two gateways and two short replicas. Traffic is steady
and streamed. Once the application is complete again, and after a pause, the next process of the kind is
killed.

Nodes die in separate Ray clusters: all processes of a node at once. Each kind has its own cluster, with one
node more than the application needs. So lost replicas start elsewhere, and the dead node is restarted before
the next death. Clients connect to the gateways of running nodes, as a load balancer would direct them.
"""

import asyncio
import contextlib
import itertools
import random
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import httpx
import psutil
import uvloop

from experiments.common.application import (
    Application,
    emulated_pool,
    is_whole,
    serve_config,
    served_application,
)
from experiments.common.audit import NO_LIMIT, SteadyTraffic, ends_of
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.node_application import NAME, NodeApplication, served_on_nodes
from experiments.common.nodes import HEAD, NodeSpec
from experiments.common.processes import titled
from experiments.common.provenance import generated
from serve_app.core.settings_base import POSITIVE, at_least, settings


class DeathSignal(StrEnum):
    """Signal to a process: SIGKILL ends it, SIGSTOP halts it with its connections open."""

    KILL = "KILL"
    STOP = "STOP"


@settings
class DeathsCase:
    """Deaths of one kind.

    Attributes:
        kind: of process, one of `run.PROCESSES`, or of node, one of `nodes.KINDS`.
        times: number of deaths.
        resume_streams: setting of the model.
    """

    kind: str
    signal: DeathSignal
    times: Annotated[int, at_least(1)]
    resume_streams: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """Return the key of its row."""
        key: dict[str, Any] = {"kind": self.kind, "signal": self.signal.value}
        return key | ({"resume_streams": True} if self.resume_streams else {})


@settings
class DeathsSettings:
    """Settings of the part.

    Attributes:
        cases: each with its own application.
        pause_s: mean time from a complete application to the next death.
        longest_s: time limit of a case, even with fewer deaths.
        headless_s: time from the death of a head until another is started.
    """

    cases: tuple[DeathsCase, ...]
    rate_per_s: Annotated[float, POSITIVE]
    pause_s: Annotated[float, POSITIVE]
    longest_s: Annotated[float, POSITIVE]
    headless_s: Annotated[float, POSITIVE]


TIMEOUT_S = 60.0
LENGTHS = 180
"""Number of different lengths of answers."""
# Log lines follow their answers a little later.
LOG_DELAY_S = 2.0


_POLL_S = 0.2


@dataclass(slots=True)
class DeathsPlay:
    """One application under traffic and deaths.

    Attributes:
        back_s: time from each death until the application was complete; None if it took too long.
    """

    settings: DeathsSettings
    case: DeathsCase
    traffic: SteadyTraffic = field(init=False)
    back_s: list[float | None] = field(init=False, default_factory=list)

    async def send(self, client: Callable[[], httpx.AsyncClient]) -> None:
        """Send requests until some time after the last death."""
        # The gateway replaces spaces in a request's ID, and the answer would count as another's.
        label = self.case.kind.replace(" ", "-")
        self.traffic = SteadyTraffic(label, self.settings.rate_per_s, client, LENGTHS)
        await self.traffic.run_beside(self._die_again_and_again())

    def figures(self, log: Iterable[str]) -> dict[str, Any]:
        """Return the ends of requests and the times until killed processes were replaced.

        Args:
            log: log lines of all gateways.
        """
        return {
            **ends_of(self.traffic.ended, log, f"{self.traffic.label}-"),
            "deaths": len(self.back_s),
            "back_s": self.back_s,
            "slowest_s": max(one.ended_s - one.started_s for one in self.traffic.ended),
        }

    async def _die_again_and_again(self) -> None:
        chance = random.Random(self.case.kind)  # noqa: S311 - when, and which of several
        ends_at = self.traffic.began + self.settings.longest_s
        while len(self.back_s) < self.case.times and time.monotonic() < ends_at:
            await asyncio.to_thread(self.prepare)
            await asyncio.sleep(self.settings.pause_s * chance.uniform(0.5, 1.5))
            self.back_s.append(await asyncio.to_thread(self.die, chance))
        await asyncio.sleep(self.settings.pause_s)

    def prepare(self) -> None:
        """Wait until clients can do without the next one that dies."""

    @abstractmethod
    def die(self, chance: random.Random) -> float | None:
        """Kill the next one; return the seconds until the application is complete, or None if too late."""


def until(condition: Callable[[], bool], since: float, timeout_s: float) -> float | None:
    """Wait for a condition; return the seconds since a time, or None if it took too long."""
    while time.monotonic() < since + timeout_s:
        if condition():
            return time.monotonic() - since
        time.sleep(_POLL_S)
    return None


# Process title and number of processes of each kind.
PROCESSES = {
    "scheduler": ("ray::ServeReplica:deaths:scheduler", 1),
    "gateway": ("ray::ServeReplica:deaths:gateway", 2),
    "short": ("ray::ServeReplica:deaths:short", 2),
    "long": ("ray::ServeReplica:deaths:long", 1),
    "tuner": ("ray::ServeReplica:deaths:tuner", 1),
    "controller": ("ray::ServeController", 1),
}
_REPLICAS = 3
_PROCESS_TIMEOUT_S = 120.0


@dataclass(slots=True)
class ProcessDeathsPlay(DeathsPlay):
    """Processes of one kind die."""

    served: Application

    async def run(self) -> None:
        """Send requests until some time after the last death."""
        async with httpx.AsyncClient(base_url=self.served.url, timeout=TIMEOUT_S, limits=NO_LIMIT) as http:
            await self.send(lambda: http)

    def die(self, chance: random.Random) -> float | None:
        """Kill a process, which has a replacement that works as far as a scheduler can tell."""
        victim = chance.choice(self._processes())
        before = self.served.status().get("incarnation", 0)
        victim.send_signal(signal.Signals[f"SIG{self.case.signal}"])
        back_s = until(lambda: self._is_whole(victim, before), time.monotonic(), _PROCESS_TIMEOUT_S)
        if back_s is None:
            with contextlib.suppress(psutil.Error):
                victim.kill()
        return back_s

    def _processes(self) -> list[psutil.Process]:
        return [process for process, _ in titled(self.served.pid, PROCESSES[self.case.kind][0])]

    def _is_whole(self, victim: psutil.Process, before: int) -> bool:
        found = self._processes()
        if victim in found or len(found) < PROCESSES[self.case.kind][1]:
            return False
        status = self.served.status()
        newer = self.case.kind != "scheduler" or status.get("incarnation", 0) > before
        return newer and is_whole(status, _REPLICAS, PROCESSES["gateway"][1])


# Nodes


ENGINES, SCHEDULER, CONTROL = "node of engines", "node of the scheduler", "control service"
KINDS = (ENGINES, SCHEDULER, HEAD, CONTROL)
_NODE_TIMEOUT_S = 300.0
_SHORT = _ENTRANCES = 2


def play_nodes(settings: DeathsSettings, case: DeathsCase) -> dict[str, Any]:
    """Return the figures of one kind."""
    with served_on_nodes(_workers(case.kind), _node_args()) as served:
        played = NodeDeathsPlay(settings, case, served)
        uvloop.run(played.run())
        time.sleep(LOG_DELAY_S)
        figures = played.figures(served.cluster.log_lines(NAME, "gateway"))
        return {**figures, "without_s": played.without_s} if played.without_s else figures


@dataclass(slots=True)
class NodeDeathsPlay(DeathsPlay):
    """Nodes of one kind die.

    Attributes:
        without_s: time from each death of a head until another had started.
        entrances: nodes to which clients connect now, if they run.
    """

    served: NodeApplication
    without_s: list[float] = field(default_factory=list)
    entrances: Sequence[str] = ()

    async def run(self) -> None:
        """Send requests until some time after the last death."""
        nodes = self.served.cluster.nodes
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(
                    httpx.AsyncClient(base_url=node.url, timeout=TIMEOUT_S, limits=NO_LIMIT)
                )
                for name, node in nodes.items()
            }
            turns = itertools.count()

            def client() -> httpx.AsyncClient:
                up = [name for name in self.entrances if nodes[name].is_up]
                return clients[up[next(turns) % len(up)]]

            await asyncio.to_thread(self.prepare)
            await self.send(client)

    def prepare(self) -> None:
        """Wait until clients can connect to two nodes."""
        self._until(self._finds_entrances)

    def die(self, _: random.Random) -> float | None:
        """Kill a node, or take the head away."""
        return self._head_dies() if self.case.kind in {HEAD, CONTROL} else self._node_dies()

    def _node_dies(self) -> float | None:
        """Kill a node and wait until the application is complete on other nodes; then restart the node."""
        served = self.served
        deployment = "short-demo" if self.case.kind == ENGINES else "scheduler-demo"
        victim, before = served.nodes_of(deployment)[0], served.status()["incarnation"]
        since = time.monotonic()
        if self.case.signal is DeathSignal.STOP:
            served.cluster.nodes[victim].halt()
        else:
            served.cluster.kill(victim)
        # When the node has restarted, its gateway has not.
        self.entrances = [name for name in self.entrances if name != victim]

        def is_whole() -> bool:
            return self._has_all_replicas() and (
                deployment != "scheduler-demo" or served.status()["incarnation"] > before
            )

        back_s = self._until(is_whole, since)
        served.cluster.start(victim)
        return back_s

    def _head_dies(self) -> float | None:
        """Take the head away for a while and kill a replica; complete means that the replica is replaced."""
        cluster, since = self.served.cluster, time.monotonic()
        if self.case.kind == HEAD:
            cluster.kill(HEAD)
        else:
            cluster.kill_control_service()
            # `ray start --block` ends the rest of the head.
            self._until(lambda: not cluster.nodes[HEAD].is_up)
        time.sleep(self.settings.headless_s / 2)
        self.served.kill_replica("short-demo")
        time.sleep(max(0.0, since + self.settings.headless_s - time.monotonic()))
        cluster.start(HEAD)
        self.without_s.append(time.monotonic() - since)
        return self._until(self._has_all_replicas, since)

    def _has_all_replicas(self) -> bool:
        return len(self.served.nodes_of("short-demo")) == _SHORT and self.served.is_whole()

    def _finds_entrances(self) -> bool:
        """Return whether clients can connect to two nodes, so that one may die."""
        of_head = self.case.kind in {HEAD, CONTROL}
        names = [HEAD] * (not of_head) + [each.name for each in _workers(self.case.kind) if each.num_cpus]
        self.entrances = [name for name in self.served.entrances() if name in names]
        return len(self.entrances) >= _ENTRANCES

    def _until(self, condition: Callable[[], bool], since: float | None = None) -> float | None:
        return until(condition, time.monotonic() if since is None else since, _NODE_TIMEOUT_S)


def _workers(kind: str) -> list[NodeSpec]:
    """Return as many nodes as are needed without one, and one more of those that die."""

    def gateways(count: int) -> Iterator[NodeSpec]:
        return (NodeSpec(f"g{number}", num_cpus=1) for number in range(1, count + 1))

    if kind == ENGINES:
        return [*gateways(2), *(NodeSpec(f"e{n}", resources={"short": 1, "long": 1}) for n in (1, 2, 3))]
    return [*gateways(3 if kind == SCHEDULER else 2), NodeSpec("e1", resources={"short": 2, "long": 1})]


def _node_args() -> dict[str, Any]:
    def pool(name: str, longest: int, replicas: int) -> dict[str, Any]:
        resources = {"num_cpus": 0.0, "custom": {name: 1}}
        return emulated_pool(name, replicas, resources=resources, max_model_len=longest)

    models = [{"name": "demo", "pools": [pool("short", 2048, _SHORT), pool("long", 8192, 1)]}]
    # More than half of a node's core, so that no node has two gateways.
    return {"models": models, "gateways": {"replicas": 2, "num_cpus": 0.6}}


def play(settings: DeathsSettings, context: Context) -> Iterator[Measurement]:
    """Measure each kind with a new application."""
    for case in settings.cases:
        if context.has(case.key):
            continue
        figures = (play_nodes if case.kind in KINDS else _play_processes)(settings, case)
        yield Measurement(key=case.key, figures=figures, seeds=(0,), traces=generated("steady traffic"))


def _play_processes(settings: DeathsSettings, case: DeathsCase) -> dict[str, Any]:
    with served_application(_config(case)) as served:
        played = ProcessDeathsPlay(settings, case, served)
        uvloop.run(played.run())
        time.sleep(LOG_DELAY_S)
        return played.figures(served.log_lines("gateway"))


def _config(case: DeathsCase) -> dict[str, Any]:
    resources = {"num_cpus": 0.1}
    pools = [
        emulated_pool("short", 2, resources=resources, max_model_len=2048),
        emulated_pool("long", 1, resources=resources, max_model_len=8192),
    ]
    # The tuner starts with the first requests, so that it can be killed.
    tuner = {"advanced": {"learn_from": 2}}
    models = [{"name": "demo", "pools": pools, "resume_streams": case.resume_streams, "tuner": tuner}]
    return serve_config("deaths", {"models": models, "gateways": {"replicas": 2, "num_cpus": 0.1}})


EXPERIMENT = Experiment(settings=DeathsSettings, play=play)
