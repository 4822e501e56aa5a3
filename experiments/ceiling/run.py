"""How many requests per second can one scheduler do, and what breaks first?

Drives the production scheduler through the events of each request, with tenants, two pools and the queues of
EWSJF. Each engine is a simple queue (`core`), so nearly all of the time is the scheduler's. CPU time is read
around each event, so other processes hardly count. Python's garbage collector is tuned as in the scheduler's
own process.

In the first part the fleet is large enough to keep up. In the second the backlog has a constant length: a
request arrives as soon as fewer are queued.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from experiments.ceiling.core import KINDS, CorePlay, Costs, Engines, median_tokens
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from serve_app.core.metrics.summary import Distribution
from serve_app.core.settings_base import POSITIVE, at_least, settings
from serve_app.lab.simulation.run import Disclosure, TraceChoice, at_rate, choose_trace, fit, requests_of
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import Trace
from serve_app.serving.process import tune_memory

_CONTEXT_TOKENS = 32_768
_KV_BLOCK_TOKENS = 16
# Every request has a timeout, as in production, but none of them ends.
_TIMEOUT_S = 1_000_000.0
# Arrivals at the end of the backlog's growth, from which its cost is read.
_PROBES = 200


@settings
class CeilingSettings:
    """Settings of the experiment.

    Attributes:
        replicas: sizes of fleets that keep up.
        tenants: number of tenants that share all requests.
        waiting: lengths of the backlog, at `waiting_replicas` replicas.
        per_replica_per_s: requests per second for each replica.
        fill_requests: arrivals before the measurement for ten replicas; larger fleets get more.
        requests: measured arrivals, likewise.
    """

    replicas: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    waiting_replicas: Annotated[int, at_least(2)] = 20
    per_replica_per_s: Annotated[float, POSITIVE] = 10.0
    tenants: Annotated[int, at_least(1)] = 200
    fill_requests: Annotated[int, at_least(1)] = 500
    requests: Annotated[int, at_least(1)] = 1_000
    report_interval_s: Annotated[float, POSITIVE] = 0.2
    trace: str = "azure-conv"
    policy: str = "ewsjf"
    seed: int = 0


def play(settings: CeilingSettings, context: Context) -> Iterator[Measurement]:
    """Measure one fleet after another, then the backlogs."""
    tune_memory()
    for replicas in settings.replicas:
        key: dict[str, Any] = {"part": "events", "replicas": replicas}
        if not context.has(key):
            yield _row(settings, key, _events(settings, replicas))
    for waiting in settings.waiting:
        key = {"part": "waiting", "waiting": waiting}
        if not context.has(key):
            # A new process, because memory freed by an earlier part would count as free.
            context_of_its_own = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context_of_its_own) as process:
                figures = process.submit(_waiting, settings, waiting).result()
            yield _row(settings, key, figures)


def _row(settings: CeilingSettings, key: dict[str, Any], figures: dict[str, Any]) -> Measurement:
    return Measurement(key=key, figures=figures, seeds=(settings.seed,), traces=trace_sources(settings.trace))


def _events(settings: CeilingSettings, replicas: int) -> dict[str, Any]:
    """Measure the costs of a fleet that keeps up."""
    # More requests for a large fleet, so that each of its replicas gets some.
    times = max(1.0, (replicas / 10) ** 0.5)
    fill, measured = round(times * settings.fill_requests), round(times * settings.requests)
    trace = _trace(settings, fill + measured + 1, settings.per_replica_per_s * replicas)
    core = _core(settings, replicas, _requests(trace))
    core.play(fill)
    costs = core.play(measured)
    return _figures(costs) | {
        "offered_per_s": settings.per_replica_per_s * replicas,
        "reports_per_s": replicas / settings.report_interval_s,
    }


def _figures(costs: Costs) -> dict[str, Any]:
    spent_us = {kind: [spent / 1_000 for spent in costs.spent_ns[kind]] for kind in KINDS.values()}
    return {
        "all_us": sum(map(sum, spent_us.values())),
        "events_us": {kind: Distribution.of(us).as_json() for kind, us in spent_us.items() if us},
        "requests": costs.requests,
        "span_s": costs.span_s,
        "rejected": costs.rejected,
        "longest_wait_s": max(costs.waits_s, default=0.0),
    }


def _waiting(settings: CeilingSettings, waiting: int) -> dict[str, Any]:
    """Measure memory, including the requests, and costs at a constant backlog."""
    tune_memory()
    replicas = settings.waiting_replicas
    fill, measured = settings.fill_requests * 2, settings.requests
    rate_per_s = settings.per_replica_per_s * replicas
    trace = _trace(settings, waiting + fill + measured + 1, rate_per_s)
    gc.collect()
    before = _resident_bytes()
    core = _core(settings, replicas, _requests(trace))
    growth = core.play_backlog(waiting, waiting)
    after = _resident_bytes()
    core.play_backlog(waiting, fill)
    costs = core.play_backlog(waiting, measured)
    growth.spent_ns["arrival"] = growth.spent_ns["arrival"][-_PROBES:]
    return _figures(costs) | {
        "replicas": replicas,
        "waiting": len(core.scheduler.queue),
        "made": len(trace.requests),
        "bytes_per_request": (after - before) / len(trace.requests),
        "resident_bytes": after,
        "last_of_growth": _figures(growth),
    }


def _core(settings: CeilingSettings, replicas: int, requests: list[SimulatedRequest]) -> CorePlay:
    engines = Engines(replicas, requests, report_interval_s=settings.report_interval_s)
    return CorePlay(engines, policy=settings.policy, b_short_tokens=median_tokens(requests))


def _trace(settings: CeilingSettings, count: int, rate_per_s: float) -> Trace:
    choice = TraceChoice(name=settings.trace, requests=count, tenants=str(settings.tenants))
    return at_rate(fit(choose_trace(choice, settings.seed), _CONTEXT_TOKENS).trace, rate_per_s)


def _requests(trace: Trace) -> list[SimulatedRequest]:
    return list(requests_of(trace, Disclosure(queue_timeout_s=_TIMEOUT_S), _KV_BLOCK_TOKENS))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _unavailable() -> str | None:
    return (
        None if Path("/proc/self/statm").exists() else "resident memory is read from /proc, which is missing"
    )


EXPERIMENT = Experiment(settings=CeilingSettings, play=play, unavailable=_unavailable)
