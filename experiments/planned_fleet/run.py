"""Does a fleet that the planner sized keep its limits when it is served?

Plans two pools for a trace, starts an application with exactly these pools and replicas, each an emulated
engine of the planned profile, and plays the trace against it over HTTP. Seed by seed the same requests are
also simulated, at the same times. Bodies state no `max_tokens`, as the plan assumes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.common.application import Application, started_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.open_loop import play_trace
from experiments.common.processes import CpuMeter, role_of
from experiments.common.provenance import trace_sources
from experiments.planned_fleet.fleet import MODEL, PATIENCE_S, PlannedFleetSettings, model, planned
from serve_app.bench.bodies import BenchEndpoint, BodyKind, BodySettings
from serve_app.command import progress_bar
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import slo_attainment_ratio
from serve_app.metrics.statistics import percentile
from serve_app.planning.sizing.candidates import SizedFleet
from serve_app.planning.sizing.verification import RunFigures, Verifier, Workload
from serve_app.workloads.trace import Trace

ALL = "all"
SOURCES = ("planned", "simulated", "observed")
_WARM_UP_RATIO = 0.1
_FIGURES = ("p99_ttft_s", "p99_tpot_s")


def play(settings: PlannedFleetSettings, context: Context) -> Iterator[Measurement]:
    """Plan, simulate, serve; a row for each source of figures."""
    if all(context.has({"source": source}) for source in SOURCES):
        return
    fleet = planned(settings)
    groups = (ALL, *fleet.plan.pools)
    traces, seeds = trace_sources(settings.trace), range(settings.repeats)
    plan = {
        "pools": {pool: str(one) for pool, one in fleet.plan.pools.items()},
        "replicas": dict(fleet.counts),
        "b_short_tokens": fleet.plan.b_short_tokens,
    }
    runs = fleet.verification.runs
    figures = {**_of_simulation(runs, groups), "plan": plan}
    yield Measurement(
        key={"source": "planned"}, figures=figures, seeds=range(settings.plan_seeds), traces=traces
    )
    same = Workload(trace=settings.choice(), rate_per_s=settings.rate_per_s, slo=settings.slo)
    simulated = Verifier(same).measure(fleet.plan, fleet.counts, seeds).runs
    figures = _of_simulation(simulated, groups)
    yield Measurement(key={"source": "simulated"}, figures=figures, seeds=seeds, traces=traces)
    with started_application("planned-fleet", [model(fleet)]) as served:
        live = _live_runs(settings, fleet, served)
    yield Measurement(key={"source": "observed"}, figures=_columns(live), seeds=seeds, traces=traces)


def tails(
    records: Sequence[RequestRecord], figure: Callable[[RequestRecord], float | None]
) -> dict[str, float]:
    """The P99 of what completed, by the pool that served and of all."""
    values: dict[str, list[float]] = {}
    for record in records:
        value = figure(record)
        if record.completed and value is not None:
            for group in (ALL, record.pool or "?"):
                values.setdefault(group, []).append(value)
    return {group: percentile(sorted(own), 99) for group, own in sorted(values.items())}


def _live_runs(
    settings: PlannedFleetSettings, fleet: SizedFleet, served: Application
) -> list[dict[str, Any]]:
    live = []
    with progress_bar("planned_fleet", settings.repeats) as advance:
        for seed in range(settings.repeats):
            live.append(_live_run(settings, settings.live_trace(fleet, seed), served))
            advance()
    return live


def _live_run(settings: PlannedFleetSettings, trace: Trace, served: Application) -> dict[str, Any]:
    """One live run, in figures; the first tenth of its requests is not measured."""
    # Bodies state no limit, and engines are told the length of the answer.
    bodies = BodySettings(model=MODEL, kind=BodyKind.EMULATED, endpoint=BenchEndpoint.CHAT, max_tokens=0)
    meter = CpuMeter((served.pid,), role_of)
    before, began = meter.read(), time.monotonic()
    load = play_trace(served.url, bodies, trace, PATIENCE_S)
    seconds = time.monotonic() - began
    used = meter.used_since(before, seconds)
    records = sorted(load.records, key=lambda record: record.arrived_at)
    measured = records[round(_WARM_UP_RATIO * len(records)) :]
    return {
        "p99_ttft_s": tails(measured, lambda record: record.ttft_s),
        "p99_tpot_s": tails(measured, lambda record: record.tpot_s),
        "requests": len(records),
        "lost": sum(not record.completed for record in records),
        "late": load.client.late,
        "within": slo_attainment_ratio(measured, settings.slo) or 0.0,
        "cores": {role: cpu_s / seconds for role, cpu_s in sorted(used.items())},
    }


def _of_simulation(runs: Sequence[RunFigures], groups: Sequence[str]) -> dict[str, Any]:
    """Tails of all and of each pool, in each run; None where a pool served nobody."""
    tails_of = {
        name: {group: [_tail(run, name, group) for run in runs] for group in groups} for name in _FIGURES
    }
    counts = {name: [getattr(run, name) for run in runs] for name in ("requests", "lost", "preemptions")}
    return {**tails_of, **counts}


def _tail(run: RunFigures, name: str, group: str) -> float | None:
    found: float | None = getattr(run if group == ALL else run.by_pool.get(group), name, None)
    return found


def _columns(live: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures by name, with one value for each run."""
    columns: dict[str, Any] = {}
    for name, first in live[0].items():
        if isinstance(first, dict):
            groups = sorted({group for run in live for group in run[name]})
            columns[name] = {group: [run[name].get(group) for run in live] for group in groups}
        else:
            columns[name] = [run[name] for run in live]
    return columns


EXPERIMENT = Experiment(settings=PlannedFleetSettings, play=play)
