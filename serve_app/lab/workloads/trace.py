"""A trace: the requests of a workload in the order of arrival, and their provenance.

Transformations of traces (cut, repeat, merge, scale) are recorded in the trace's `source`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from serve_app.errors import ServeAppError
from serve_app.request import PriorityClass

PREFIX_BLOCK_TOKENS = 512
"""Tokens per id in `TraceRequest.prefix`; Mooncake's block size."""


class TraceError(ServeAppError):
    """A trace cannot be read or generated; the message names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a workload, with its true output length, which no scheduler sees.

    Attributes:
        arrival_s: seconds after the start of the trace.
        output_tokens: true length of the output.
        prefix: ids of the prompt's leading blocks of `PREFIX_BLOCK_TOKENS`; equal ids mean equal text.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows of a file without a valid request: their number, and the line of the first one."""

    count: int
    first: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests by arrival, and their provenance.

    Attributes:
        source: the file, or the figures from which it was generated, with every later change.
        skipped: unreadable rows by reason; None for a generated trace.
        synthetic: names of published traces in it whose files are missing, so that their requests are
            generated.
    """

    name: str
    source: str
    requests: tuple[TraceRequest, ...]
    skipped: Mapping[str, SkippedRows] | None = None
    synthetic: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"trace {self.name!r} ({self.source}) has no request")

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrival rate, `(n - 1) / span`; None if all requests arrive at once."""
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else None

    @property
    def pace(self) -> str:
        """Its rate in words."""
        rate_per_s = self.rate_per_s
        return "at once" if rate_per_s is None else f"at {rate_per_s:.2f} requests/s"

    @property
    def title(self) -> str:
        """Name for a caption, which states if generated lengths replace those of a file."""
        if not self.synthetic:
            return self.name
        parts = "" if self.synthetic == tuple(self.name.split("+")) else f" of {', '.join(self.synthetic)}"
        return f"{self.name} (generated lengths{parts})"

    def provenance(self) -> dict[str, object]:
        """Return what a result file records about its workload."""
        skipped = {reason: rows.count for reason, rows in (self.skipped or {}).items()}
        return {
            "name": self.name,
            "source": self.source,
            "generated_without_file": list(self.synthetic),
            "requests": len(self.requests),
            "rate_per_s": self.rate_per_s,
            "prompt_tokens": sum(request.prompt_tokens for request in self.requests),
            "output_tokens": sum(request.output_tokens for request in self.requests),
            "skipped_rows": skipped,
        }


def take(trace: Trace, count: int, rng: np.random.Generator | None = None) -> Trace:
    """Return `count` consecutive requests, from a position drawn by `rng`, or from the start.

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
    """Merge all requests of several traces on one clock, by arrival. Ties retain the order of traces."""
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
        synthetic=tuple(missing for trace in merged for missing in trace.synthetic),
    )


def scale_to_rate(trace: Trace, rate_per_s: float) -> Trace:
    """Scale time so that the mean rate is `rate_per_s`. The pattern of bursts is unchanged.

    Raises:
        TraceError: the rate is not positive, or all requests arrive at once.
    """
    if not 0 < rate_per_s < float("inf"):
        raise TraceError(f"rate must be positive, got {rate_per_s}")
    own_rate_per_s = trace.rate_per_s
    if own_rate_per_s is None:
        raise TraceError(
            f"all {len(trace.requests)} requests of {trace.name!r} "
            "arrive at once, so there is no rate to scale"
        )
    factor = own_rate_per_s / rate_per_s
    requests = tuple(replace(one, arrival_s=one.arrival_s * factor) for one in trace.requests)
    source = f"{trace.source}, scaled from {own_rate_per_s:.4g} to {rate_per_s:.4g} requests/s"
    return replace(trace, requests=requests, source=source)


def _repeated(trace: Trace, count: int) -> tuple[TraceRequest, ...]:
    have = len(trace.requests)
    # One mean gap between two repetitions, so that the boundary is neither a burst nor a pause.
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
