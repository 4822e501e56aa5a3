"""Many runs in several processes; results come in the order of the runs."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TypeVar

from serve_app.simulation.load import load_key, saturated_rate_per_s
from serve_app.simulation.run import RunResult, RunSettings, simulate

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


def at_load(
    runs: Sequence[RunSettings], load: float, *, jobs: int, on_rate: Callable[[], object] = lambda: None
) -> list[RunSettings]:
    """The runs at a share of the rate that saturates their replicas, see `load` and `saturated_rates`."""
    rates = saturated_rates(runs, jobs=jobs, on_rate=on_rate)
    return [replace(run, rate_per_s=load * rate, load=load) for run, rate in zip(runs, rates, strict=True)]


def saturated_rates(
    runs: Sequence[RunSettings], *, jobs: int, on_rate: Callable[[], object] = lambda: None
) -> list[float]:
    """The rate at load 1.0 for each run, measured once for those that share fleet, trace and seed.

    Args:
        on_rate: called after each measurement.
    """
    keys = [load_key(run.fleet, run.trace, run.seed) for run in runs]
    different = dict(zip(keys, runs, strict=True))
    rates = {}
    for key, rate in zip(different, parallel(_saturated_rate, list(different.values()), jobs), strict=True):
        rates[key] = rate
        on_rate()
    return [rates[key] for key in keys]


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
