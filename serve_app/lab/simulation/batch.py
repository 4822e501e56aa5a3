"""Batches of runs in several processes, with results in the order of the runs, and load 1.0.

Load 1.0 is the rate at which replicas finish requests with an unlimited backlog. All requests wait from the
start, and the scheduler serves them first come first served. The rate is counted from the time when every
engine's batch has turned over twice until the last request is dispatched. At both ends the batches are full,
so neither filling nor emptying them counts.

Load 1.0 is independent of the method under test: of its policy, its scheduler settings, and its chunk limit
for long prefills in the engine. So one load is one arrival rate, and policies at one load receive the same
requests at the same times.
"""

import bisect
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TypeVar

from serve_app.lab.simulation.run import (
    Disclosure,
    FleetSettings,
    RunResult,
    RunSettings,
    TraceChoice,
    choose_trace,
    fit,
    requests_of,
    scheduler_settings,
    simulate,
)
from serve_app.lab.simulation.simulation import Simulation
from serve_app.lab.workloads.trace import Trace, take

# A short trace is repeated to at least this multiple of the capacity of the batches.
_MIN_TURNOVERS = 10
_MIN_REQUESTS = 4_000
_TURNOVERS_TO_FILL = 2

_measured: dict[str, float] = {}
"""Rates that this process has already measured, by `load_key`."""


def saturated_rate_per_s(fleet: FleetSettings, choice: TraceChoice, seed: int) -> float:
    """Return the requests per second at load 1.0, for the requests of this seed.

    Raises:
        TraceError: there is no such trace, or none of its requests fits the engines.
    """
    key = load_key(fleet, choice, seed)
    if key not in _measured:
        _measured[key] = saturated_rate_of(fleet.without_chunk_limits(), choose_trace(choice, seed))
    return _measured[key]


def load_key(fleet: FleetSettings, choice: TraceChoice, seed: int) -> str:
    """Return all inputs of load 1.0, as a text to compare."""
    # Arrival times do not affect load 1.0, because all requests arrive at once.
    return repr((fleet.without_chunk_limits(), replace(choice, arrivals=None), seed))


def saturated_rate_of(fleet: FleetSettings, trace: Trace) -> float:
    """Compute `saturated_rate_per_s` for any trace, uncached. A chunk limit in the fleet counts."""
    plans = fleet.plans()
    in_batches = sum(plan.engine.max_num_seqs for plan in plans)
    fitted = fit(trace, max(plan.engine.max_model_len for plan in plans)).trace
    backlog = _backlog(fitted, max(_MIN_REQUESTS, _MIN_TURNOVERS * in_batches))
    requests = list(requests_of(backlog, Disclosure(), plans[0].engine.block_size))
    records = Simulation(scheduler_settings("fcfs", fleet.routing, {}), plans).run(requests)
    ends = sorted(record.finished_at for record in records if record.completed)
    first = _TURNOVERS_TO_FILL * in_batches
    last_dispatch = max(record.dispatched_at for record in records if record.dispatched_at is not None)
    last = bisect.bisect_right(ends, last_dispatch) - 1
    return (last - first) / (ends[last] - ends[first])


def _backlog(trace: Trace, at_least: int) -> Trace:
    """Return all requests at once, repeated if there are too few."""
    enough = take(trace, max(at_least, len(trace.requests)))
    return replace(enough, requests=tuple(replace(one, arrival_s=0.0) for one in enough.requests))


Item = TypeVar("Item")
Result = TypeVar("Result")


def run_all(runs: Sequence[RunSettings], *, jobs: int, keep_records: bool = False) -> Iterator[RunResult]:
    """Play all runs.

    Args:
        jobs: number of processes; 1 plays them one after the other in this process.
        keep_records: whether to return the records of each request too; sending many of them between
            processes takes long.
    """
    yield from parallel(simulate if keep_records else _figures_only, runs, jobs)


def at_load(
    runs: Sequence[RunSettings], load: float, *, jobs: int, on_rate: Callable[[], object] = lambda: None
) -> list[RunSettings]:
    """Return the runs at a share of the rate that saturates their replicas, see `saturated_rates`."""
    rates = saturated_rates(runs, jobs=jobs, on_rate=on_rate)
    return [replace(run, rate_per_s=load * rate, load=load) for run, rate in zip(runs, rates, strict=True)]


def saturated_rates(
    runs: Sequence[RunSettings], *, jobs: int, on_rate: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the rate at load 1.0 for each run, measured once per fleet, trace and seed."""
    keys = [load_key(run.fleet, run.trace, run.seed) for run in runs]
    different = dict(zip(keys, runs, strict=True))
    rates = {}
    for key, rate in zip(different, parallel(_saturated_rate, list(different.values()), jobs), strict=True):
        rates[key] = rate
        on_rate()
    return [rates[key] for key in keys]


def parallel(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """Yield `work` of every item, computed in `jobs` processes; with 1 job, in this process."""
    if jobs == 1 or len(items) < 2:
        yield from map(work, items)
        return
    # Spawn, because a fork of a process that draws a progress bar may hang on the bar's lock.
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
