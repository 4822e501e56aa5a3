"""The first part: what observing costs, beside no application and beside scheduling."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from experiments.common.application import Application
from experiments.common.closed_loop import ClosedLoop, Exchange
from experiments.common.light_endpoint import MODEL
from experiments.common.processes import CpuMeter
from experiments.observe_cost.mode import ACTIVE, OBSERVE, set_mode
from experiments.observe_cost.settings import CostSettings
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.workloads.trace import TraceRequest

WAYS = ("direct", "observe", "active")
ROLES = ("gateway", "scheduler", "haproxy", "watcher")
_REQUEST = TraceRequest(arrival_s=0.0, prompt_tokens=20, output_tokens=8)
_WARM_UP_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class _Player:
    """Sends by each way.

    Attributes:
        direct: the servers.
    """

    served: Application
    direct: tuple[str, ...]
    meter: CpuMeter
    settings: CostSettings

    def sample(self, way: str, requests: int) -> dict[str, float]:
        """One closed loop: medians of its times, and CPU time a request."""
        urls = self.direct if way == "direct" else (self.served.url,)
        if way != "direct":
            set_mode(self.served, MODEL, OBSERVE if way == "observe" else ACTIVE)
        before, began = self.meter.read(), time.monotonic()
        exchanges = uvloop.run(_exchanged(urls, self.settings.clients, requests))
        seconds = time.monotonic() - began
        used = self.meter.used_since(before, seconds)
        return {
            "per_s": requests / seconds,
            "first_ms": 1_000 * statistics.median(one.first_s for one in exchanges),
            "whole_ms": 1_000 * statistics.median(one.whole_s for one in exchanges),
            **{f"{role}_cpu_ms": 1_000 * used.get(role, 0.0) / requests for role in ROLES},
        }


def cost_figures(
    served: Application, ports: Sequence[int], meter: CpuMeter, settings: CostSettings
) -> dict[str, Any]:
    """Lists by way and figure, with one value for each round."""
    player = _Player(served, tuple(f"http://127.0.0.1:{port}" for port in ports), meter, settings)
    for way in WAYS:
        player.sample(way, max(settings.clients, round(_WARM_UP_SHARE * settings.requests)))
    meter.calibrate(settings.idle_s)
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(settings.rounds):
        first = number % len(WAYS)
        for way in (*WAYS[first:], *WAYS[:first]):
            samples[way].append(player.sample(way, settings.requests))
    return {way: {name: [one[name] for one in found] for name in found[0]} for way, found in samples.items()}


async def _exchanged(urls: Sequence[str], clients: int, requests: int) -> list[Exchange]:
    """The clients and requests are shared out evenly among the URLs."""
    loops = [_loop(url).run(clients // len(urls), requests // len(urls)) for url in urls]
    return [exchange for found in await asyncio.gather(*loops) for exchange in found]


def _loop(url: str) -> ClosedLoop:
    target = Target.parse(url)
    bodies = BodyFactory(BodySettings(model=MODEL, stream=True), target.authority)
    return ClosedLoop(ConnectionPool(target), bodies, _REQUEST, stream=True)
