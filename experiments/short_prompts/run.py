"""What does prefill isolation do to traffic whose prompts are all short?

Ours calls no prompt long that fits in one chunk. Beside it: the same without that rule, and no isolation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.lengths import Lengths, drawn_trace
from experiments.common.rows import Key
from experiments.common.seeded import measured_points
from serve_app.metrics.statistics import percentile
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.isolation import prefill_isolation
from serve_app.scheduling.isolation.prefill_isolation import NEVER_LONG_TOKENS, IsolationSettings
from serve_app.settings_base import settings
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.load import saturated_rate_of
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.trace import Trace

OURS, NO_RULE, NO_ISOLATION = "ours", "without the rule", "no isolation"
WAYS = (OURS, NO_RULE, NO_ISOLATION)
_BACKLOG = 4_000


@settings
class ShortPrompts:
    """What is played.

    Attributes:
        loads: shares of the rate at which the engine is saturated.
        seconds: of arrivals.
        traffic: lengths of each kind of traffic, by tenant.
    """

    seeds: int
    loads: tuple[float, ...]
    seconds: float
    profiles: tuple[str, ...]
    traffic: Mapping[str, Mapping[str, Lengths]]


@dataclass(frozen=True, slots=True)
class Run:
    """One kind of traffic at one load with one seed."""

    experiment: ShortPrompts
    profile: str
    traffic: str
    load: float
    seed: int


def play(experiment: ShortPrompts, context: Context) -> Iterator[Measurement]:
    """Every point; all ways meet the same requests."""
    seeds = range(experiment.seeds)
    points: list[tuple[Key, list[Run]]] = [
        (
            {"profile": profile, "traffic": traffic, "load": load},
            [Run(experiment, profile, traffic, load, seed) for seed in seeds],
        )
        for profile, traffic, load in product(experiment.profiles, experiment.traffic, experiment.loads)
    ]
    yield from measured_points(
        "short_prompts", points, _figures, context, traffic="lengths drawn from ranges"
    )


def _figures(run: Run) -> dict[str, Any]:
    fleet = FleetSettings(profile=run.profile, replicas={ONE_POOL: 1})
    lengths = run.experiment.traffic[run.traffic]
    backlog = drawn_trace(lengths, 1.0, _BACKLOG, run.seed)
    rate = run.load * saturated_rate_of(fleet.without_chunk_limits(), backlog)
    trace = drawn_trace(lengths, rate, round(rate * run.experiment.seconds), run.seed)
    base = scheduler_settings("ewsjf", fleet.routing, {})
    off = replace(base, isolation=IsolationSettings(max_long_prefills=0))

    played = {
        NO_RULE: _played(base, 0, fleet, trace),
        NO_ISOLATION: _played(off, NEVER_LONG_TOKENS, fleet, trace),
        OURS: _played(base, NEVER_LONG_TOKENS, fleet, trace),
    }
    return {f"{way}, {name}": value for way, figures in played.items() for name, value in figures.items()}


def _played(
    settings: SchedulerSettings, never_long_tokens: int, fleet: FleetSettings, trace: Trace
) -> dict[str, float]:
    prefill_isolation.NEVER_LONG_TOKENS = never_long_tokens
    plans = fleet.plans(isolated=True)
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    records = Simulation(settings, plans).run(requests)
    ttfts = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    e2es = sorted(record.finished_at - record.arrived_at for record in records)
    return {
        "requests_per_s": len(records) / max(record.finished_at for record in records),
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "e2e_p50_s": percentile(e2es, 50),
        "e2e_p99_s": percentile(e2es, 99),
    }


EXPERIMENT = Experiment(settings=ShortPrompts, play=play)
