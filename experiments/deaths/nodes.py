"""Node deaths of a Ray cluster: all processes of a node die at once.

Each kind has its own cluster, with one node more than the application needs. So lost replicas start
elsewhere, and the dead node is restarted before the next death. Clients connect to the gateways of running
nodes, as a load balancer would direct them.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvloop

from experiments.common.audit import NO_LIMIT, SteadyTraffic
from experiments.common.node_application import NAME, NodeApplication, served_on_nodes
from experiments.common.nodes import HEAD, NodeSpec
from experiments.deaths.traffic import (
    LENGTHS,
    LOG_DELAY_S,
    TIMEOUT_S,
    DeathsCase,
    DeathSignal,
    DeathsSettings,
    figures_of,
)

ENGINES, SCHEDULER, CONTROL = "node of engines", "node of the scheduler", "control service"
KINDS = (ENGINES, SCHEDULER, HEAD, CONTROL)
_BACK_TIMEOUT_S = 300.0
_POLL_S = 0.2
_SHORT = _ENTRANCES = 2


def play_nodes(settings: DeathsSettings, case: DeathsCase) -> dict[str, Any]:
    """Return the figures of one kind."""
    with served_on_nodes(_workers(case.kind), _args()) as served:
        played = NodeDeathsPlay(settings, case, served)
        uvloop.run(played.run())
        time.sleep(LOG_DELAY_S)
        return played.figures()


@dataclass(slots=True)
class NodeDeathsPlay:
    """One cluster under traffic and deaths.

    Attributes:
        back_s: time from each death until the application was complete; None if it took too long.
        without_s: time from each death of a head until another had started.
        entrances: nodes to which clients connect now, if they run.
    """

    settings: DeathsSettings
    case: DeathsCase
    served: NodeApplication
    back_s: list[float | None] = field(default_factory=list)
    without_s: list[float] = field(default_factory=list)
    entrances: Sequence[str] = ()
    traffic: SteadyTraffic | None = None

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

            await asyncio.to_thread(self._until, self._finds_entrances)
            # The gateway replaces spaces in a request's ID, and the answer would count as another's.
            label = self.case.kind.replace(" ", "-")
            self.traffic = SteadyTraffic(label, self.settings.rate_per_s, client, LENGTHS)
            await self.traffic.run_beside(self._die_again_and_again(self.traffic.began))

    def figures(self) -> dict[str, Any]:
        """Return the figures of the row."""
        assert self.traffic is not None, "it has run"
        log = self.served.cluster.log_lines(NAME, "gateway")
        figures = figures_of(self.traffic, self.back_s, log)
        return {**figures, "without_s": self.without_s} if self.without_s else figures

    async def _die_again_and_again(self, began: float) -> None:
        chance = random.Random(self.case.kind)  # noqa: S311 - when, and which of several nodes
        while len(self.back_s) < self.case.times and time.monotonic() < began + self.settings.longest_s:
            await asyncio.to_thread(self._until, self._finds_entrances)
            await asyncio.sleep(self.settings.pause_s * chance.uniform(0.5, 1.5))
            of_head = self.case.kind in {HEAD, CONTROL}
            self.back_s.append(await asyncio.to_thread(self._head_dies if of_head else self._node_dies))
        await asyncio.sleep(self.settings.pause_s)

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
        """Wait for a condition; return the seconds, or None if it took too long."""
        began = time.monotonic() if since is None else since
        while time.monotonic() < began + _BACK_TIMEOUT_S:
            if condition():
                return time.monotonic() - began
            time.sleep(_POLL_S)
        return None


def _workers(kind: str) -> list[NodeSpec]:
    """Return as many nodes as are needed without one, and one more of those that die."""

    def gateways(count: int) -> Iterator[NodeSpec]:
        return (NodeSpec(f"g{number}", num_cpus=1) for number in range(1, count + 1))

    if kind == ENGINES:
        return [*gateways(2), *(NodeSpec(f"e{n}", resources={"short": 1, "long": 1}) for n in (1, 2, 3))]
    return [*gateways(3 if kind == SCHEDULER else 2), NodeSpec("e1", resources={"short": 2, "long": 1})]


def _args() -> dict[str, Any]:
    def pool(name: str, longest: int, replicas: int) -> dict[str, Any]:
        return {
            "name": name,
            "engine": {"emulated": {"profile": "laptop", "max_model_len": longest}},
            "replicas": replicas,
            "resources": {"num_cpus": 0.0, "custom": {name: 1}},
        }

    models = [{"name": "demo", "pools": [pool("short", 2048, _SHORT), pool("long", 8192, 1)]}]
    # More than half of a node's core, so that no node has two gateways.
    return {"models": models, "gateways": {"replicas": 2, "num_cpus": 0.6}}
