"""Node failures of a Ray cluster under load, including the head: effect on clients, and recovery.

Each node is a separate `ray start`. Gateways and the scheduler find cores on two of them, engines their
resources on three others, and the head has neither.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from experiments.common.audit import ENDS, Ended, asked, body_of
from experiments.common.errors import ExperimentError
from experiments.common.node_application import NodeApplication, served_on_nodes
from experiments.common.nodes import HEAD, NodeSpec
from experiments.common.redeployment import deploy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GATEWAYS, ENGINES = ["g1", "g2"], ["e1", "e2", "e3"]
ANSWERED, REJECTED, EVENT, BEFORE, MIDWAY, _, WRONG, LOST = ENDS
LIMITS = httpx.Limits(max_connections=None)
TOKENS = 300
PLACEMENT_GROUPS = """
import json, sys
import ray
from ray.util import placement_group_table

ray.init(address=sys.argv[1], log_to_driver=False)
print(json.dumps([each for each in placement_group_table().values() if each["state"] == "CREATED"]))
"""
WHOLE_S = 240.0


def pool(name: str, longest: int, replicas: int, resources: dict[str, Any]) -> dict[str, Any]:
    engine = {"emulated": {"profile": "laptop", "max_model_len": longest}}
    return {
        "name": name,
        "engine": engine,
        "replicas": replicas,
        "resources": {"num_cpus": 0.0, **resources},
    }


# An engine of the long pool spans two nodes; it is emulated, so its second half is only reserved.
BUNDLES = {"placement_bundles": [{"long": 1}, {"long": 1}], "placement_strategy": "STRICT_SPREAD"}
ARGS = {
    "models": [
        {
            "name": "demo",
            "pools": [
                pool("short", 2048, 2, {"custom": {"short": 1}}),
                pool("long", 8192, 1, {"advanced": BUNDLES}),
            ],
        }
    ],
    "gateways": {"replicas": 2, "num_cpus": 0.4},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[NodeApplication]:
    workers = [NodeSpec(name, num_cpus=1) for name in GATEWAYS]
    workers += [NodeSpec(name, resources={"short": 1, "long": 1}) for name in ENGINES]
    with served_on_nodes(workers, ARGS) as served:
        yield served


@pytest.fixture
def nodes(cluster: NodeApplication) -> NodeApplication:
    """Return the application with all of its nodes, whatever the previous test left."""
    dead = [name for name, node in cluster.cluster.nodes.items() if not node.is_up]
    cluster.cluster.start(*dead)
    cluster.wait(cluster.is_whole, WHOLE_S, "a whole fleet")
    wanted = set(cluster.nodes_of("gateway"))
    cluster.wait(lambda: wanted <= set(cluster.entrances()), WHOLE_S, "gateways that answer")
    return cluster


def entrances(nodes: NodeApplication, *but: str) -> list[str]:
    """Return the nodes that clients can connect to, except some."""
    return sorted(set(nodes.entrances()) - set(but))


@dataclass
class Load:
    """Steady requests, half of them streamed, through the gateways of some nodes.

    Attributes:
        killed_at: when a node was killed, on the clock of `Ended`.
    """

    served: NodeApplication
    name: str
    through: Sequence[str]
    ended: list[Ended] = field(default_factory=list)
    killed_at: float = 0.0

    async def run(self, requests: int, over_s: float, disrupt: Callable[[], Awaitable[None]]) -> None:
        """Start the requests evenly and call `disrupt` in the middle; return when all have ended."""
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client(name)) for name in self.through]

            async def one(number: int) -> None:
                await asyncio.sleep(number * over_s / requests)
                name, http = f"{self.name}-{number}", clients[number // 2 % len(clients)]
                started_s, ask = time.monotonic(), (asked, whole)[number % 2]
                end, detail = await ask(http, name, TOKENS)
                self.ended.append(Ended(name, end, started_s, time.monotonic(), detail))

            async def kill() -> None:
                await asyncio.sleep(over_s / 2)
                self.killed_at = time.monotonic()
                await disrupt()

            await asyncio.gather(kill(), *map(one, range(requests)))

    def _client(self, node: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.served.cluster.nodes[node].url, timeout=60, limits=LIMITS)

    def ends(self, *, streamed: bool) -> Counter[str]:
        """Count the ends of streamed or of whole answers."""
        return Counter(one.end for one in self.ended if (number_of(one) % 2 == 0) is streamed)

    def unexpected_ends(self) -> list[Ended]:
        return [one for one in self.ended if one.end not in {ANSWERED, EVENT, BEFORE, MIDWAY}]


async def whole(http: httpx.AsyncClient, name: str, tokens: int) -> tuple[str, str]:
    """Send a request that is answered in one piece."""
    body = {**body_of(name, tokens), "stream": False}
    del body["stream_options"]
    try:
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": name})
    except httpx.TimeoutException as exc:
        return LOST, repr(exc)
    except httpx.TransportError as exc:
        return BEFORE, repr(exc)
    if answer.status_code != 200:
        return REJECTED, f"{answer.status_code}: {answer.text}"
    found = answer.json()["usage"]["completion_tokens"]
    return (ANSWERED, "") if found == tokens else (WRONG, f"{found} tokens")


def number_of(one: Ended) -> int:
    return int(one.name.rpartition("-")[2])


async def nothing() -> None:
    pass


def killing(nodes: NodeApplication, name: str) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.to_thread(nodes.cluster.kill, name)


def test_pools_and_gateways_are_where_their_resources_are(nodes: NodeApplication) -> None:
    assert set(nodes.nodes_of("gateway")) == set(GATEWAYS)
    (scheduler,) = nodes.nodes_of("scheduler-demo")
    assert scheduler in GATEWAYS
    short, (long,) = nodes.nodes_of("short-demo"), nodes.nodes_of("long-demo")
    assert len(set(short)) == 2
    assert {*short, long} <= set(ENGINES)


def test_an_engine_over_two_nodes_has_a_bundle_on_each(nodes: NodeApplication) -> None:
    # In a separate process: this one may use several clusters in succession.
    command, environment = (
        [sys.executable, "-c", PLACEMENT_GROUPS, nodes.cluster.address],
        nodes.cluster.environment(HEAD),
    )
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (group,) = json.loads(found.stdout)
    assert group["strategy"] == "STRICT_SPREAD"
    assert list(group["bundles"].values()) == [{"long": 1.0}, {"long": 1.0}]
    assert len(set(group["bundles_to_node_id"].values())) == 2


async def test_requests_of_a_dead_node_are_answered_elsewhere_or_end_with_an_event(
    nodes: NodeApplication,
) -> None:
    victim = nodes.nodes_of("short-demo")[0]
    load = Load(nodes, "node", entrances(nodes, victim))
    await load.run(80, 4.0, killing(nodes, victim))
    assert load.ends(streamed=False) == {ANSWERED: 40}
    streamed = load.ends(streamed=True)
    assert set(streamed) == {ANSWERED, EVENT}, load.ended
    await asyncio.to_thread(nodes.wait, nodes.is_whole, WHOLE_S, "replicas on another node")
    assert victim not in nodes.nodes_of("short-demo")


async def test_the_scheduler_and_a_gateway_die_with_their_node(nodes: NodeApplication) -> None:
    """Only connections through its gateway break."""
    (victim,) = nodes.nodes_of("scheduler-demo")
    incarnation = nodes.status()["incarnation"]
    load = Load(nodes, "scheduler", entrances(nodes, victim))
    await load.run(80, 8.0, killing(nodes, victim))
    assert load.unexpected_ends() == []
    broken = [one for one in load.ended if one.end != ANSWERED]
    assert all(one.end in {BEFORE, MIDWAY} for one in broken), broken
    assert all(one.started_s < load.killed_at + 10 for one in broken), (load.killed_at, broken)
    await asyncio.to_thread(nodes.wait, nodes.is_whole, WHOLE_S, "a scheduler on another node")
    assert nodes.status()["incarnation"] > incarnation
    later = Load(nodes, "later", entrances(nodes))
    await later.run(10, 1.0, nothing)
    assert {one.end for one in later.ended} == {ANSWERED}


async def test_requests_continue_without_the_head_and_nothing_new_starts(nodes: NodeApplication) -> None:
    incarnation = nodes.status()["incarnation"]
    load = Load(nodes, "head", entrances(nodes, HEAD))
    await load.run(60, 6.0, killing(nodes, HEAD))
    assert {one.end for one in load.ended} == {ANSWERED}
    # A replica that dies now is not replaced, and the rest serves.
    await asyncio.to_thread(nodes.kill_replica, "short-demo")
    without = Load(nodes, "without", entrances(nodes, HEAD))
    await without.run(60, 12.0, nothing)
    assert {one.end for one in without.ended} == {ANSWERED}
    assert len(nodes.nodes_of("short-demo")) == 1
    with pytest.raises(ExperimentError):
        await asyncio.to_thread(
            deploy, nodes.cluster.address, nodes.config, nodes.cluster.environment(HEAD), 10.0
        )
    await asyncio.to_thread(nodes.cluster.start, HEAD)
    await asyncio.to_thread(nodes.wait, nodes.is_whole, WHOLE_S, "a replica in place of the dead one")
    # The scheduler was never replaced.
    assert nodes.status()["incarnation"] == incarnation
    later = Load(nodes, "with", entrances(nodes))
    await later.run(12, 1.0, nothing)
    assert {one.end for one in later.ended} == {ANSWERED}


async def test_the_head_ends_with_its_control_service_and_its_successor_finds_all(
    nodes: NodeApplication,
) -> None:
    """`ray start --block` ends when one of Ray's processes does, so that a supervisor restarts it."""

    async def disrupt() -> None:
        nodes.cluster.kill_control_service()

    load = Load(nodes, "control", entrances(nodes, HEAD))
    await load.run(40, 4.0, disrupt)
    assert {one.end for one in load.ended} == {ANSWERED}
    head = nodes.cluster.nodes[HEAD]
    await asyncio.to_thread(nodes.wait, lambda: not head.is_up, 60, "the end of the head")
    await asyncio.to_thread(nodes.cluster.start, HEAD)
    await asyncio.to_thread(nodes.kill_replica, "long-demo")
    await asyncio.to_thread(nodes.wait, lambda: not nodes.is_whole(), 30, "the loss of a replica")
    await asyncio.to_thread(nodes.wait, nodes.is_whole, WHOLE_S, "a replica in place of the dead one")
