"""Many runs in several processes; results come in the order of the runs."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TypeVar

from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.load import saturated_rate_per_s
from serve_app.simulation.run import RunResult, RunSettings, simulate
from serve_app.simulation.workload import TraceChoice

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(runs: Sequence[RunSettings], *, jobs: int, keep_records: bool = False) -> Iterator[RunResult]:
    """Play all runs.

    Args:
        jobs: processes; 1 plays them one after the other in this one.
        keep_records: return the records of each request too, which plots need; sending them between
            processes is a large part of the work when there are many.
    """
    yield from parallel(simulate if keep_records else _figures_only, runs, jobs)


def at_load(runs: Sequence[RunSettings], load: float, *, jobs: int) -> list[RunSettings]:
    """The runs at a share of the rate that saturates their replicas, see `load`."""
    return [
        replace(run, rate_per_s=load * rate, load=load)
        for run, rate in zip(runs, saturated_rates(runs, jobs=jobs), strict=True)
    ]


def saturated_rates(runs: Sequence[RunSettings], *, jobs: int) -> list[float]:
    """The rate at load 1.0 for each run, measured once for those that share fleet, trace and seed."""
    places: dict[str, int] = {}
    different: list[RunSettings] = []
    for run in runs:
        if places.setdefault(_what_load_depends_on(run), len(different)) == len(different):
            different.append(run)
    rates = list(parallel(_saturated_rate, different, jobs))
    return [rates[places[_what_load_depends_on(run)]] for run in runs]


def _what_load_depends_on(run: RunSettings) -> str:
    parts: tuple[FleetSettings, TraceChoice, int] = (run.fleet.without_chunk_limits(), run.trace, run.seed)
    return repr(parts)


def parallel(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """`work` on every item; items and results travel between processes.

    Args:
        jobs: processes; 1 does everything in this one.
    """
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    # A fresh interpreter each: a fork of one that draws a progress bar may hang on the bar's lock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), mp_context=context) as processes:
        try:
            yield from processes.map(work, items)
        except BaseException:
            processes.shutdown(cancel_futures=True)
            raise


def _saturated_rate(run: RunSettings) -> float:
    return saturated_rate_per_s(run.fleet, run.trace, run.seed)


def _figures_only(run: RunSettings) -> RunResult:
    return replace(simulate(run), records=[], measured=[])
