"""Disturbances of a trace: other arrival patterns, and a mix of lengths that flips half-way."""

from dataclasses import replace

import numpy as np

from serve_app.workloads.arrivals import Arrivals, GammaArrivals, OnOffArrivals
from serve_app.workloads.trace import Trace, TraceError, TraceRequest


def with_arrivals(trace: Trace, pattern: str, rng: np.random.Generator) -> Trace:
    """The same requests in the same order, at other times of the same mean rate.

    Args:
        pattern: `poisson`; `gamma:CV` with a coefficient of variation of the gaps; or `on-off:ON,OFF` with
            the mean lengths of busy and silent spells, counted in requests at the mean rate, so that a
            pattern keeps its shape at any load.

    Raises:
        TraceError: there is no such pattern, or all requests arrive at once.
    """
    rate_per_s = trace.rate_per_s
    if rate_per_s is None:
        raise TraceError(f"all requests of {trace.name!r} arrive at once: there is no rate to keep")
    times = _arrivals(pattern, rate_per_s).sample(len(trace.requests), rng)
    requests = tuple(replace(one, arrival_s=float(at)) for one, at in zip(trace.requests, times, strict=True))
    return replace(trace, requests=requests, source=f"{trace.source}, arrivals {pattern}")


def _arrivals(pattern: str, rate_per_s: float) -> Arrivals:
    kind, _, numbers = pattern.partition(":")
    try:
        if kind == "poisson" and not numbers:
            return GammaArrivals(rate_per_s=rate_per_s)
        if kind == "gamma":
            return GammaArrivals(rate_per_s=rate_per_s, cv=float(numbers))
        if kind == "on-off":
            on, off = (float(number) / rate_per_s for number in numbers.split(","))
            return OnOffArrivals(rate_per_s=rate_per_s, on_s=on, off_s=off)
    except ValueError as exc:
        raise TraceError(f"cannot read arrivals {pattern!r}: {exc}") from exc
    raise TraceError(f"no arrivals {pattern!r}: write poisson, gamma:3.5 or on-off:400,300")


def with_flipped_mix(trace: Trace, short_at_tokens: int, rng: np.random.Generator) -> Trace:
    """The same trace, with the shares of short and long prompts exchanged in its second half.

    Args:
        short_at_tokens: longest prompt that counts as short.

    Raises:
        TraceError: all prompts are of one kind.
    """
    short = [one for one in trace.requests if one.prompt_tokens <= short_at_tokens]
    long = [one for one in trace.requests if one.prompt_tokens > short_at_tokens]
    if not short or not long:
        raise TraceError(
            f"no mix to flip: all prompts of {trace.name!r} are on one side of {short_at_tokens} tokens"
        )
    middle = len(trace.requests) // 2
    flipped = trace.requests[:middle] + tuple(
        _sized_like(one, long if one.prompt_tokens <= short_at_tokens else short, rng)
        for one in trace.requests[middle:]
    )
    return replace(trace, requests=flipped, source=f"{trace.source}, mix flipped from request {middle:,} on")


def _sized_like(one: TraceRequest, models: list[TraceRequest], rng: np.random.Generator) -> TraceRequest:
    model = models[int(rng.integers(len(models)))]
    return replace(
        one, prompt_tokens=model.prompt_tokens, output_tokens=model.output_tokens, prefix=model.prefix
    )
