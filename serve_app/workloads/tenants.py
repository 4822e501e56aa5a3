"""Shares of tenants and priority classes, and their assignment to the requests of a trace."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from serve_app.request import PriorityClass
from serve_app.workloads.trace import Trace, TraceError

ZIPF_EXPONENT = 1.0
"""The first of ten tenants then sends 34 % of requests, within the 16 to 52 % of production (ServeGen)."""


def zipf_shares(count: int, exponent: float = ZIPF_EXPONENT) -> dict[str, float]:
    """Shares of `tenant-1` to `tenant-n`, proportional to `1 / rank^exponent`; 0 makes them equal."""
    if count < 1 or not exponent >= 0:
        raise TraceError(
            f"tenants need a count of at least 1 and an exponent of at least 0, got {count}:{exponent}"
        )
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    return {f"tenant-{rank}": weight / sum(weights) for rank, weight in enumerate(weights, start=1)}


def parse_shares(text: str) -> dict[str, float]:
    """Read `8` (Zipf), `8:1.2` (with an exponent) or `search=3,chat=1` (named, by weight).

    Raises:
        TraceError: the text is none of these.
    """
    try:
        if "=" not in text:
            count, _, exponent = text.partition(":")
            return zipf_shares(int(count), float(exponent or ZIPF_EXPONENT))
        pairs = [part.partition("=") for part in text.split(",")]
        weights = {name.strip(): float(weight) for name, _, weight in pairs}
    except ValueError as exc:
        raise TraceError(f"cannot read shares {text!r}: write 8, 8:1.2 or search=3,chat=1") from exc
    if "" in weights or not all(0 < weight < float("inf") for weight in weights.values()):
        raise TraceError(f"shares need a name and a positive weight each, got {text!r}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def assign_tenants(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Give each request a tenant, drawn by share."""
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(trace, requests=tuple(replace(request, tenant=name) for request, name in requests))


def assign_priorities(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Give each request a priority class, drawn by share.

    Raises:
        TraceError: a name is no priority class.
    """
    unknown = set(shares) - set(PriorityClass)
    if unknown:
        raise TraceError(f"no priority class {', '.join(sorted(unknown))}: use {', '.join(PriorityClass)}")
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(
        trace, requests=tuple(replace(request, priority=PriorityClass(name)) for request, name in requests)
    )


def _drawn(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> list[str]:
    """A name for each request, drawn by share."""
    drawn = rng.choice(list(shares), len(trace.requests), p=list(shares.values()))
    return [str(name) for name in drawn]
