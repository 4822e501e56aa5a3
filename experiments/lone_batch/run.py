"""What is batch work served while nobody else is there, and what does that cost who comes?

Ours gives an engine more batch work once no request above that class has come for two seconds. Beside it: the
same without that rule.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.lengths import Lengths, drawn_trace
from experiments.common.rows import Key
from experiments.common.seeded import measured_points
from serve_app.metrics.record import RequestRecord
from serve_app.request import PriorityClass
from serve_app.scheduling.dispatch import lone_batch
from serve_app.scheduling.dispatch.lone_batch import LULL_S
from serve_app.settings_base import settings
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.load import saturated_rate_of
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.trace import Trace

OURS, NO_RULE = "ours", "without the rule"
WAYS: Mapping[str, float] = {OURS: LULL_S, NO_RULE: math.inf}
_BATCH, _INTERACTIVE = "night", "people"
_BACKLOG = 4_000


@settings
class LoneBatchPlay:
    """What is played.

    Attributes:
        seconds: of batch work, at the rate that saturates the engine.
        gaps_s: mean seconds between interactive requests; 0 for none.
    """

    seeds: int
    seconds: float
    profiles: tuple[str, ...]
    batch: Mapping[str, Lengths]
    interactive: Lengths
    gaps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One backlog beside one stream of interactive requests, with one seed."""

    experiment: LoneBatchPlay
    profile: str
    batch: str
    gap_s: float
    seed: int


def play(experiment: LoneBatchPlay, context: Context) -> Iterator[Measurement]:
    """Every point; both ways meet the same requests."""
    seeds = range(experiment.seeds)
    points: list[tuple[Key, list[Run]]] = [
        (
            {"profile": profile, "batch": batch, "gap_s": gap_s},
            [Run(experiment, profile, batch, gap_s, seed) for seed in seeds],
        )
        for profile, batch, gap_s in product(experiment.profiles, experiment.batch, experiment.gaps_s)
    ]
    yield from measured_points("lone_batch", points, _figures, context, traffic="lengths drawn from ranges")


def _figures(run: Run) -> dict[str, Any]:
    fleet = FleetSettings(profile=run.profile, replicas={ONE_POOL: 1})
    trace = _trace(run, fleet)
    figures: dict[str, Any] = {}
    for way, lull_s in WAYS.items():
        lone_batch.LULL_S = lull_s
        plans = fleet.plans(isolated=True)
        requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
        records = Simulation(scheduler_settings("ewsjf", fleet.routing, {}), plans).run(requests)
        batch = [record for record in records if record.tenant == _BATCH]
        ended_at = max(record.finished_at for record in batch)
        figures[f"{way}, batch_per_s"] = len(batch) / ended_at
        figures[f"{way}, ttfts_s"] = [round(ttft_s, 4) for ttft_s in _ttfts(records, ended_at)]
    return figures


def _ttfts(records: list[RequestRecord], before: float) -> list[float]:
    """Of interactive requests that came while there was batch work."""
    return [
        record.ttft_s
        for record in records
        if record.tenant == _INTERACTIVE and record.arrived_at < before and record.ttft_s is not None
    ]


def _trace(run: Run, fleet: FleetSettings) -> Trace:
    experiment = run.experiment
    lengths = {_BATCH: experiment.batch[run.batch]}
    rate_per_s = saturated_rate_of(
        fleet.without_chunk_limits(), drawn_trace(lengths, 1.0, _BACKLOG, run.seed)
    )
    count = round(rate_per_s * experiment.seconds)
    backlog = drawn_trace(lengths, 1.0, count, run.seed).requests
    requests = [replace(one, arrival_s=0.0, priority=PriorityClass.BATCH) for one in backlog]
    if run.gap_s:
        # For as long as the backlog may take; who comes later is not counted.
        people = {_INTERACTIVE: experiment.interactive}
        interactive = drawn_trace(
            people, 1 / run.gap_s, math.ceil(3 * experiment.seconds / run.gap_s), run.seed
        )
        requests += [replace(one, priority=PriorityClass.INTERACTIVE) for one in interactive.requests]
    requests.sort(key=lambda one: one.arrival_s)
    return Trace(name="a backlog", source="a backlog", requests=tuple(requests))


EXPERIMENT = Experiment(settings=LoneBatchPlay, play=play)
