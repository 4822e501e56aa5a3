"""What do receipts cost a gateway and a scheduler, for each request, when all is well and when most wait?

Three gateways, each with a scheduler of its own, stand before one light engine: two pairs keep no receipts,
and one does. A cheap client sends requests through each in turn, and each process tells the CPU time that it
has used.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import MODEL
from experiments.common.provenance import generated
from experiments.overhead.client import Client, Load, started_client
from experiments.overhead.system import started_light_engines
from experiments.receipt_cost.node import Node, started_node
from serve_app.command import progress_bar
from serve_app.settings_base import POSITIVE, at_least, settings

OFF, CONTROL, ON = "off", "off, a second one", "on"
WAYS = (OFF, CONTROL, ON)
ROLES = ("gateway", "scheduler")


@settings
class ReceiptCostSettings:
    """What is sent.

    Attributes:
        chunks: of the answer of each kind of request; 0 asks for a whole answer of one token.
        clients: that send one request after the other.
        turn_s: that each pair has in a round.
    """

    chunks: Mapping[str, int]
    clients: tuple[int, ...]
    rounds: Annotated[int, at_least(1)]
    turn_s: Annotated[float, POSITIVE]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A gateway and its scheduler."""

    url: str
    nodes: Mapping[str, Node]

    def cpu_s(self) -> dict[str, float]:
        return {role: node.cpu_s() for role, node in self.nodes.items()}


def play(settings: ReceiptCostSettings, context: Context) -> Iterator[Measurement]:
    """Every kind of request, with every number of clients."""
    played = [(kind, clients) for kind in settings.chunks for clients in settings.clients]
    missing = [each for each in played if not context.has(_key(*each))]
    with progress_bar("receipt_cost", settings.rounds * len(missing)) as advance, ExitStack() as stack:
        light, endpoints = stack.enter_context(started_light_engines())
        pairs = {way: _started_pair(way, endpoints.ports[0], stack) for way in WAYS}
        client = stack.enter_context(started_client())
        for kind, clients in missing:
            chunks = settings.chunks[kind]
            light.tell("answer", chunks, 2.0 if chunks else 0.0)
            costs: dict[str, list[float]] = defaultdict(list)
            for pair in pairs.values():
                # What is made for a first request is not counted.
                client.play(_load(pair, chunks, clients, 0.3))
            for number in range(settings.rounds):
                # In an order of its own each time, so that none is always behind the same one.
                for way in random.Random(number).sample(WAYS, len(WAYS)):  # noqa: S311 - no secret
                    load = _load(pairs[way], chunks, clients, settings.turn_s)
                    for role, cpu_ms in _cpu_ms(client, pairs[way], load).items():
                        costs[f"{role}, {way}"].append(round(cpu_ms, 5))
                advance()
            figures: dict[str, Any] = {**costs}
            yield Measurement(
                key=_key(kind, clients), figures=figures, traces=generated("requests of one size")
            )


def _key(kind: str, clients: int) -> dict[str, str | int | float | bool]:
    return {"request": kind, "clients": clients}


def _started_pair(way: str, engine_port: int, stack: ExitStack) -> _Pair:
    nodes = {
        role: stack.enter_context(started_node(role, keeps_receipts=way == ON))
        for role in ("scheduler", "gateway")
    }
    told = {"scheduler": nodes["scheduler"].hear(), "engine_port": engine_port}
    nodes["gateway"].say(json.dumps(told))
    return _Pair(nodes["gateway"].hear(), nodes)


def _cpu_ms(client: Client, pair: _Pair, load: Load) -> dict[str, float]:
    """Of each process of a pair, for each request of a load."""
    before = pair.cpu_s()
    played = client.play(load)
    return {role: 1_000 * (used - before[role]) / played.requests for role, used in pair.cpu_s().items()}


def _load(pair: _Pair, chunks: int, clients: int, seconds: float) -> Load:
    return Load(
        url=pair.url,
        model=MODEL,
        body_bytes=100,
        shared=False,
        stream=chunks > 0,
        tokens=max(1, chunks),
        exact=False,
        clients=clients,
        seconds=seconds,
    )


EXPERIMENT = Experiment(settings=ReceiptCostSettings, play=play)
