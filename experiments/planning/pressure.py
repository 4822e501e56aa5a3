"""Pressure: preemptions and rejections of fleets of as many GPUs, whose KV caches fill.

Fleets with the same number of GPUs get the same requests at the same times. Each runs with a plain router,
which forwards every request at once, and behind the gateway, which holds requests back until an engine's KV
cache has room for them. Load 1.0 is the rate at which the first fleet of a case finishes the requests under
FCFS.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import trace_sources
from experiments.common.rows import Key
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import (
    FleetSettings,
    RunSettings,
    SloByLength,
    choose_trace,
    saturated_rates,
    simulate,
)
from serve_app.lab.workloads import TraceChoice

_ROUTER: Mapping[str, object] = {"active_share": 0.0, "routing.spill": False}
"""Settings that reduce the gateway to the choice of a replica: the one with the fewest requests."""

CONTROLS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "router": ("fcfs", _ROUTER),
    "gateway, fcfs": ("fcfs", {}),
    "gateway, ewsjf": ("ewsjf", {}),
}
"""Policy and scheduler settings, by their names in the table."""


@settings
class PressureCase:
    """Fleets with the same number of GPUs, and their traffic.

    Attributes:
        fleets: by their names in the table; the first sets load 1.0.
    """

    name: str
    trace: str
    short_at_tokens: int
    requests: int
    loads: tuple[float, ...]
    fleets: Mapping[str, FleetSettings]

    def __post_init__(self) -> None:
        sizes = {name: fleet.gpus for name, fleet in self.fleets.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"case {self.name}: fleets must have as many GPUs each, got {sizes}")


@settings
class PressureSettings:
    """Settings of the part."""

    cases: tuple[PressureCase, ...]
    seeds: int


def play(experiment: PressureSettings, context: Context) -> Iterator[Measurement]:
    """Yield a row for each case, load, fleet and control."""
    cells = [cell for case in experiment.cases for cell in _cells(case, range(experiment.seeds), context)]
    return play_cells("pressure", cells, _played, context)


def _cells(case: PressureCase, seeds: Sequence[int], context: Context) -> Iterator[Cell[RunSettings]]:
    """Yield the cells of a case without a row."""
    keys: list[Key] = [
        {"case": case.name, "load": load, "fleet": fleet, "control": control}
        for load in case.loads
        for fleet in case.fleets
        for control in CONTROLS
    ]
    missing = [key for key in keys if not context.has(key)]
    references = [_run(case, keys[0], seed) for seed in seeds] if missing else []
    rates = saturated_rates(references, jobs=context.jobs)
    for key in missing:
        load, runs = float(key["load"]), [_run(case, key, seed) for seed in seeds]
        yield Cell(
            key=key,
            runs=[replace(run, rate_per_s=load * rate) for run, rate in zip(runs, rates, strict=True)],
            seeds=seeds,
            traces=trace_sources(case.trace),
        )


def _run(case: PressureCase, key: Key, seed: int) -> RunSettings:
    """Return the run of a seed, still without a rate; the first key has the fleet that sets load 1.0."""
    policy, scheduler = CONTROLS[str(key["control"])]
    return RunSettings(
        policy=policy,
        label=str(key["control"]),
        fleet=case.fleets[str(key["fleet"])],
        trace=TraceChoice(name=case.trace, requests=case.requests),
        seed=seed,
        load=float(key["load"]),
        scheduler=scheduler,
        slo=SloByLength(short_at_tokens=case.short_at_tokens),
        short_at_tokens=case.short_at_tokens,
    )


def _played(run: RunSettings) -> dict[str, Any]:
    result = simulate(run)
    records, summary = result.measured, result.summary
    short = [one for one in records if one.prompt_tokens <= run.short_at_tokens]
    long = [one for one in records if one.prompt_tokens > run.short_at_tokens]
    offered = len(choose_trace(run.trace, run.seed).requests)
    return {
        "gpus": run.fleet.gpus,
        "rate_per_s": run.rate_per_s,
        "preempted_short": _preempted(short),
        "preempted_long": _preempted(long),
        "preemptions_per_request": sum(one.preemptions for one in records) / len(records),
        # Requests that no engine of the fleet can hold are left out of the run, and would be rejected. An
        # answer that ends at the context is clipped.
        "rejected_ratio": (result.workload.dropped + sum(not one.completed for one in result.records))
        / offered,
        "clipped_ratio": result.workload.clipped / offered,
        "short_ttft_p99_s": summary.ttft_s.short.p99,
        "long_ttft_p99_s": summary.ttft_s.long.p99,
        "queue_wait_max_s": max(one.queue_wait_s or 0.0 for one in records),
        "tpot_p99_s": summary.tpot_s.all.p99,
        "goodput_per_s": summary.goodput_per_s,
    }


def _preempted(records: list[RequestRecord]) -> float:
    """Return the share of these requests that were preempted at least once."""
    return sum(one.preemptions > 0 for one in records) / max(1, len(records))


EXPERIMENT = Experiment(settings=PressureSettings, play=play)
