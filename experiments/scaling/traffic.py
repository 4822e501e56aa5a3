"""Traffic that changes: steps of either kind, bursts, a wave, an hour of Azure's own arrivals."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from serve_app.lab.simulation.run import TraceChoice, choose_trace
from serve_app.lab.workloads import OnOffArrivals, Trace, TraceRequest, stream

# Multiples of the base rates of short and long requests, one phase after another.
STEPS = ((1.0, 1.0), (4.0, 1.0), (1.0, 1.0), (1.0, 4.0), (1.0, 1.0), (0.0, 0.0))
# Copies of Azure's hour, so that several replicas are needed; each copy is shifted a little.
_COPIES, _SPREAD_S = 2, 10.0
# Context of the engines for long requests.
_CONTEXT = 16_384

Times = NDArray[np.float64]


def steps(seed: int, span_s: float, base: float) -> Times:
    """Return Poisson arrivals whose rate changes with each phase; `base` is the rate of multiple 1."""
    return _poisson(lambda at_s: base * STEPS[_phase(at_s, span_s)][0], 4 * base, span_s, seed)


def long_steps(seed: int, span_s: float, base: float) -> Times:
    """Return the same for long requests."""
    return _poisson(lambda at_s: base * STEPS[_phase(at_s, span_s)][1], 4 * base, span_s, seed + 1_000)


def wave(seed: int, span_s: float, base: float) -> Times:
    """Return arrivals that rise and fall by a factor of seven, three times: compressed days."""
    most = 4.0 * base

    def rate(at_s: float) -> float:
        return base * (2.25 - 1.65 * math.cos(2 * math.pi * 3 * at_s / span_s))

    return _poisson(rate, most, span_s, seed)


def bursts(seed: int, span_s: float, base: float) -> Times:
    """Return bursts: on for two minutes and off for three on average; the mean rate is 1.6 times the base."""
    arrivals = OnOffArrivals(rate_per_s=1.6 * base, on_s=120.0, off_s=180.0)
    found = arrivals.sample(math.ceil(6 * base * span_s), stream(seed, "bursts"))
    return np.asarray(found[found < span_s], dtype=np.float64)


_SHORT: Mapping[str, Callable[[int, float, float], Times]] = {
    "steps": steps,
    "wave": wave,
    "bursts": bursts,
}


def traffic(name: str, seed: int, span_s: float, *, short_at: int) -> Trace:
    """Return all requests of one case.

    Args:
        name: `azure`, `steps`, `wave` or `bursts`.
        span_s: duration of arrivals; for Azure's hour its beginning.
        short_at: the border of the pools, for prompt and answer together.
    """
    if name == "azure":
        return _azure(seed, span_s)
    rng = stream(seed, "lengths")
    short, long = _SHORT[name](seed, span_s, 3.0), long_steps(seed, span_s, 0.25)
    if name != "steps":
        long = _poisson(lambda _at_s: 0.4, 0.4, span_s, seed + 1_000)
    requests = [*_requests(short, rng, (230.0, 1.0, 16, 3_000), short_at)]
    requests += _requests(long, rng, (7_000.0, 0.4, short_at + 1, 15_000), None)
    requests.sort(key=lambda one: one.arrival_s)
    return Trace(name=name, source=f"experiments/scaling, seed {seed}", requests=tuple(requests))


def _requests(
    times: Times, rng: np.random.Generator, prompts: tuple[float, float, int, int], border: int | None
) -> list[TraceRequest]:
    median, sigma, least, most = prompts
    prompt = np.clip(rng.lognormal(math.log(median), sigma, len(times)), least, most).astype(int)
    output = np.clip(rng.lognormal(math.log(180.0), 0.8, len(times)), 4, 1_000).astype(int)
    output = np.minimum(output, (border or _CONTEXT) - prompt)
    return [
        TraceRequest(arrival_s=float(at_s), prompt_tokens=int(tokens), output_tokens=int(answer))
        for at_s, tokens, answer in zip(times, prompt, output, strict=True)
    ]


def _azure(seed: int, span_s: float) -> Trace:
    rng = stream(seed, "copies")
    hour = choose_trace(TraceChoice(name="azure-conv+azure-code"), 0)
    copies = [
        replace(one, arrival_s=one.arrival_s + float(rng.uniform(0, _SPREAD_S)))
        for one in hour.requests
        if one.arrival_s < span_s
        for _ in range(_COPIES)
    ]
    copies.sort(key=lambda one: one.arrival_s)
    return Trace(
        name="azure",
        source=f"{_COPIES} x {hour.source}",
        requests=tuple(copies),
        synthetic=hour.synthetic,
    )


def _phase(at_s: float, span_s: float) -> int:
    return min(int(at_s / span_s * len(STEPS)), len(STEPS) - 1)


def _poisson(rate: Callable[[float], float], most: float, span_s: float, seed: int) -> Times:
    """Return arrivals of a changing rate, by thinning arrivals at the highest rate."""
    rng = stream(seed, "arrivals")
    count = rng.poisson(most * span_s)
    times = np.sort(rng.uniform(0, span_s, count))
    kept = rng.uniform(0, most, count) < np.array([rate(at_s) for at_s in times])
    return np.asarray(times[kept], dtype=np.float64)
