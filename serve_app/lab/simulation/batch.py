"""Many runs in several processes; results come in the order of the runs.

Load 1.0: the rate at which replicas finish requests when there is always more to do.

All requests wait from the start, and the scheduler serves them first come first served. The rate is counted
from the time when every engine's batch has turned over twice until the last request is dispatched. At both
ends the batches are full, so neither filling nor emptying them counts.

Nothing of the method under test goes into it: neither its policy, nor its scheduler settings, nor its chunk
limit for long prefills in the engine. So one load is one arrival rate, and policies at one load see the same
requests at the same times.
"""

import bisect
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TypeVar

from serve_app.lab.simulation.fleet import FleetSettings
from serve_app.lab.simulation.run import RunResult, RunSettings, simulate
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.simulation.simulation import Simulation
from serve_app.lab.simulation.workload import Disclosure, TraceChoice, choose_trace, fit, requests_of
from serve_app.lab.workloads.trace import Trace, take

# A short trace is repeated to at least so many times the capacity of the batches.
_MIN_TURNOVERS = 10
_MIN_REQUESTS = 4_000
_TURNOVERS_TO_FILL = 2

_measured: dict[str, float] = {}
"""Rates that this process has measured already, by `load_key`."""


def saturated_rate_per_s(fleet: FleetSettings, choice: TraceChoice, seed: int) -> float:
    """Requests per second at load 1.0, for the very requests of this seed.

    Raises:
        TraceError: there is no such trace, or nothing in it fits the engines.
    """
    key = load_key(fleet, choice, seed)
    if key not in _measured:
        _measured[key] = saturated_rate_of(fleet.without_chunk_limits(), choose_trace(choice, seed))
    return _measured[key]


def load_key(fleet: FleetSettings, choice: TraceChoice, seed: int) -> str:
    """Everything that load 1.0 depends on, as a text to compare."""
    # Other times of arrival are no other load: here all requests arrive at once.
    return repr((fleet.without_chunk_limits(), replace(choice, arrivals=None), seed))


def saturated_rate_of(fleet: FleetSettings, trace: Trace) -> float:
    """As `saturated_rate_per_s`, for the requests of any trace; not cached.

    Args:
        fleet: without a chunk limit for long prefills, unless that is to count.
    """
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
    """All requests at once, repeated if there are too few."""
    enough = take(trace, max(at_least, len(trace.requests)))
    return replace(enough, requests=tuple(replace(one, arrival_s=0.0) for one in enough.requests))


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
