"""What does tracing cost a gateway: off, on for a request that is not sampled, on for one that is?

Four gateways of this process stand before one light engine, two of them alike. A cheap client in another
process sends requests through each in turn, and the CPU time of this process is read, exporter threads
included. A stand-in grants every request at once, and a collector in a process of its own takes the spans.
"""

import gc
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Annotated, Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import MODEL
from experiments.common.provenance import generated
from experiments.overhead.client import Client, Load, started_client
from experiments.overhead.system import started_light_engines
from experiments.tracing_cost.collector import started_collector
from experiments.tracing_cost.gateways import started_gateways
from serve_app.command import progress_bar
from serve_app.settings_base import POSITIVE, at_least, settings

# Spans wait for a fifth of a second at most, see `gateways`. An idle process uses less of a core than that.
_POLL_S = 0.5
_IDLE_SHARE = 0.02


@settings
class TracingCostSettings:
    """What is sent.

    Attributes:
        chunks: of the answer of each kind of request; 0 asks for a whole answer of one token.
        clients: that send one request after the other.
        turn_s: that each gateway has in a round.
    """

    chunks: Mapping[str, int]
    clients: Annotated[int, at_least(1)]
    rounds: Annotated[int, at_least(1)]
    turn_s: Annotated[float, POSITIVE]


def play(settings: TracingCostSettings, context: Context) -> Iterator[Measurement]:
    """Every kind of request."""
    missing = {kind: chunks for kind, chunks in settings.chunks.items() if not context.has({"request": kind})}
    with progress_bar("tracing_cost", settings.rounds * len(missing)) as advance, ExitStack() as stack:
        light, endpoints = stack.enter_context(started_light_engines())
        collector = stack.enter_context(started_collector())
        urls = stack.enter_context(started_gateways(endpoints.ports[0], collector))
        client = stack.enter_context(started_client())
        for kind, chunks in missing.items():
            light.tell("answer", chunks, 2.0 if chunks else 0.0)
            costs: dict[str, list[float]] = defaultdict(list)
            for url in urls.values():
                # What is made for a first request is not counted.
                client.play(_load(url, chunks, settings, 0.3))
            for number in range(settings.rounds):
                # In an order of its own each time, so that none is always behind the same one.
                for way in random.Random(number).sample([*urls], len(urls)):  # noqa: S311 - no secret
                    gc.collect()
                    costs[way].append(_cpu_ms(client, _load(urls[way], chunks, settings, settings.turn_s)))
                advance()
            figures: dict[str, Any] = {way: [round(one, 5) for one in each] for way, each in costs.items()}
            yield Measurement(
                key={"request": kind}, figures=figures, traces=generated("requests of one size")
            )


def _cpu_ms(client: Client, load: Load) -> float:
    """Of this process, for each request of a load, until the last span has left."""
    began = used = time.process_time()
    played = client.play(load)
    while time.process_time() - used > _IDLE_SHARE * _POLL_S:
        used = time.process_time()
        time.sleep(_POLL_S)
    return 1_000 * (time.process_time() - began) / played.requests


def _load(url: str, chunks: int, settings: TracingCostSettings, seconds: float) -> Load:
    return Load(
        url=url,
        model=MODEL,
        body_bytes=100,
        shared=False,
        stream=chunks > 0,
        tokens=max(1, chunks),
        exact=False,
        clients=settings.clients,
        seconds=seconds,
    )


EXPERIMENT = Experiment(settings=TracingCostSettings, play=play)
