"""Load 1.0: the rate at which replicas finish requests when there is always more to do.

All requests wait from the start, and the scheduler serves them first come first served. The rate is counted
from the time when every engine's batch has turned over twice until the last request is dispatched. At both
ends the batches are full, so neither filling nor emptying them counts.

Nothing of the method under test goes into it: neither its policy, nor its scheduler settings, nor its chunk
limit for long prefills in the engine. So one load is one arrival rate, and policies at one load see the same
requests at the same times.
"""

import bisect
from dataclasses import replace

from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, fit, requests_of
from serve_app.workloads.trace import Trace
from serve_app.workloads.transform import take

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
