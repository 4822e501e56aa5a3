"""What do other clients notice of a flood of malformed bodies?

One served application with one emulated engine. Others ask for small streamed answers at a steady rate,
alternately alone and beside a process that sends malformed bodies at a rate of its own.
"""

import asyncio
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import numpy as np
import uvloop

from experiments.common.application import BUILD_APP, serve_config, served_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.malformed.mutations import malformed
from serve_app.settings_base import POSITIVE, at_least, settings

MODEL = "tiny"
_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 600.0
_JSON = {"content-type": "application/json"}
_NO_LIMIT = httpx.Limits(max_connections=None)


@settings
class MalformedSettings:
    """What is played.

    Attributes:
        bodies: malformed ones, over all rounds.
        rounds: each one stretch alone and one beside the flood, of the same length.
        others_per_s: requests of the others, which are measured.
    """

    bodies: Annotated[int, at_least(1)]
    rounds: Annotated[int, at_least(1)]
    flood_per_s: Annotated[float, POSITIVE]
    others_per_s: Annotated[float, POSITIVE]

    @property
    def stretch_s(self) -> float:
        """Seconds of one stretch."""
        return self.bodies / self.rounds / self.flood_per_s


def play(settings: MalformedSettings, context: Context) -> Iterator[Measurement]:
    """All rounds on one application: a row for the stretches alone, and one for those beside the flood."""
    if context.has({"beside": "nobody"}) and context.has({"beside": "malformed bodies"}):
        return
    others: dict[str, list[float]] = {"nobody": [], "malformed bodies": []}
    statuses: Counter[int] = Counter()
    seconds: list[float] = []
    workers = multiprocessing.get_context("spawn")
    with served_application(_config(), start_timeout_s=_START_TIMEOUT_S) as served, workers.Pool(1) as pool:
        uvloop.run(_others(served.url, settings, 5.0))  # connections, and code that runs for the first time
        for number in range(settings.rounds):
            others["nobody"] += uvloop.run(_others(served.url, settings, settings.stretch_s))
            flood = pool.apply_async(flooded, (served.url, settings, number))
            others["malformed bodies"] += uvloop.run(_others(served.url, settings, settings.stretch_s))
            found, took = flood.get()
            statuses += found
            seconds += took
    for beside, latencies in others.items():
        figures: dict[str, Any] = {"answered": len(latencies), **_percentiles(latencies)}
        if beside != "nobody":
            figures["statuses"] = {str(status): count for status, count in sorted(statuses.items())}
            figures["malformed"] = {**_percentiles(seconds), "slowest_s": max(seconds)}
        yield Measurement(key={"beside": beside}, figures=figures, seeds=(0,), traces=generated("one token"))


def flooded(url: str, settings: MalformedSettings, number: int) -> tuple[Counter[int], list[float]]:
    """Send one round's malformed bodies; the statuses, and how long each answer took."""
    return uvloop.run(_flood(url, settings, number))


async def _flood(url: str, settings: MalformedSettings, number: int) -> tuple[Counter[int], list[float]]:
    statuses: Counter[int] = Counter()
    seconds: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=_NO_LIMIT) as http:

        async def send(path: str, body: bytes) -> None:
            began = time.perf_counter()
            answer = await http.post(path, content=body, headers=_JSON)
            seconds.append(time.perf_counter() - began)
            statuses[answer.status_code] += 1

        bodies = itertools.islice(malformed(number), settings.bodies // settings.rounds)
        async with asyncio.TaskGroup() as group:
            began = time.monotonic()
            for sent, (path, body) in enumerate(bodies):
                await asyncio.sleep(max(0.0, began + sent / settings.flood_per_s - time.monotonic()))
                group.create_task(send(path, body))
    return statuses, seconds


async def _others(url: str, settings: MalformedSettings, for_s: float) -> list[float]:
    """Seconds from each request to the end of its answer."""
    seconds: list[float] = []
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=_NO_LIMIT) as http:

        async def ask() -> None:
            began = time.perf_counter()
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
            seconds.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            began = time.monotonic()
            for sent in range(max(1, round(for_s * settings.others_per_s))):
                await asyncio.sleep(max(0.0, began + sent / settings.others_per_s - time.monotonic()))
                group.create_task(ask())
    return seconds


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{percent}_s": float(np.percentile(seconds, percent)) for percent in (50, 90, 99)}


def _config() -> dict[str, Any]:
    engine = {"emulated": {"profile": "laptop"}}
    pool = {"name": "only", "engine": engine, "resources": {"num_cpus": 0.1}}
    return serve_config("malformed", [{"name": MODEL, "pools": [pool]}], BUILD_APP, 0)


EXPERIMENT = Experiment(settings=MalformedSettings, play=play)
