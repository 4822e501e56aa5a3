"""Transformations of traces: cut, repeat, merge, scale. Each one is recorded in the trace's `source`."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from serve_app.workloads.trace import Trace, TraceError, TraceRequest


def take(trace: Trace, count: int, rng: np.random.Generator | None = None) -> Trace:
    """`count` consecutive requests, from a position drawn by `rng`, or from the start.

    A trace that is too short is repeated.

    Raises:
        TraceError: `count` is below 1.
    """
    if count < 1:
        raise TraceError(f"a run needs at least one request, got {count}")
    have = len(trace.requests)
    if count > have:
        repeated = _repeated(trace, count)
        return replace(trace, requests=repeated, source=f"{trace.source}, repeated to {count:,} requests")
    start = int(rng.integers(have - count + 1)) if rng is not None else 0
    cut = trace.requests[start : start + count]
    if count == have:
        return trace
    source = f"{trace.source}, requests {start:,} to {start + count - 1:,}"
    return replace(trace, requests=_from_zero(cut), source=source)


def merge(traces: Iterable[Trace], name: str) -> Trace:
    """All requests of several traces on one clock, by arrival; ties keep the order of traces."""
    merged = list(traces)
    requests = sorted((one for trace in merged for one in trace.requests), key=lambda one: one.arrival_s)
    skipped = {
        f"{trace.name}: {reason}": rows for trace in merged for reason, rows in (trace.skipped or {}).items()
    }
    source = "merged: " + "; ".join(trace.source for trace in merged)
    return Trace(
        name=name,
        source=source,
        requests=tuple(requests),
        skipped=skipped,
        without_file=tuple(missing for trace in merged for missing in trace.without_file),
    )


def scale_to_rate(trace: Trace, rate_per_s: float) -> Trace:
    """Scale time so that the mean rate is `rate_per_s`; the pattern of bursts stays.

    Raises:
        TraceError: the rate is not positive, or all requests arrive at once.
    """
    if not 0 < rate_per_s < float("inf"):
        raise TraceError(f"rate must be positive, got {rate_per_s}")
    own_rate_per_s = trace.rate_per_s
    if own_rate_per_s is None:
        raise TraceError(
            f"all {len(trace.requests)} requests of {trace.name!r} arrive at once: no rate to scale"
        )
    factor = own_rate_per_s / rate_per_s
    requests = tuple(replace(one, arrival_s=one.arrival_s * factor) for one in trace.requests)
    source = f"{trace.source}, scaled from {own_rate_per_s:.4g} to {rate_per_s:.4g} requests/s"
    return replace(trace, requests=requests, source=source)


def _repeated(trace: Trace, count: int) -> tuple[TraceRequest, ...]:
    have = len(trace.requests)
    # One mean gap between two repetitions, so that the join is neither a burst nor a pause.
    period_s = trace.span_s + (trace.span_s / (have - 1) if have > 1 else 1.0)
    return tuple(
        replace(
            trace.requests[place % have],
            arrival_s=trace.requests[place % have].arrival_s + place // have * period_s,
        )
        for place in range(count)
    )


def _from_zero(requests: tuple[TraceRequest, ...]) -> tuple[TraceRequest, ...]:
    start_s = requests[0].arrival_s
    return tuple(replace(one, arrival_s=one.arrival_s - start_s) for one in requests)
