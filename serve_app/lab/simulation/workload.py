"""Workload of a run: the requests of a trace, fitted to the engines and disclosed to the scheduler."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads.blocks import engine_blocks, gateway_blocks
from serve_app.lab.workloads.catalog import WorkloadSettings, resolve
from serve_app.lab.workloads.generators import (
    Arrivals,
    GammaArrivals,
    OnOffArrivals,
    stream,
)
from serve_app.lab.workloads.trace import (
    PREFIX_BLOCK_TOKENS,
    Trace,
    TraceError,
    scale_to_rate,
)
from serve_app.request import PromptShape, Request, RequestSpec, Submission


def with_arrivals(trace: Trace, pattern: str, rng: np.random.Generator) -> Trace:
    """Return the same requests in the same order, at other times with the same mean rate.

    Args:
        pattern: `poisson`; `gamma:CV` with a coefficient of variation of the gaps; or `on-off:ON,OFF` with
            the mean lengths of busy and silent periods, in requests at the mean rate, so that the shape of a
            pattern is the same at any load.

    Raises:
        TraceError: there is no such pattern, or all requests arrive at once.
    """
    rate_per_s = trace.rate_per_s
    if rate_per_s is None:
        raise TraceError(f"all requests of {trace.name!r} arrive at once, so there is no rate to preserve")
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
    raise TraceError(f"unknown arrivals {pattern!r}: use poisson, gamma:3.5 or on-off:400,300")


MODEL = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """Choice of a trace, and its modifications.

    Attributes:
        name: as in `lab.workloads.catalog`; several joined by `+` are merged on one clock.
        requests: number of requests; None for all of a file, or the generator's default.
        tenants, priorities: shares, as in `lab.workloads.catalog`.
        folder: folder of trace files; None for the default folder.
        arrivals: pattern that replaces the trace's own, see `with_arrivals`.
        change: returns the modified trace of a seed, before the pattern of arrivals is applied. It must be
            hashable, and possible to send to other processes.
    """

    name: str
    requests: int | None = None
    tenants: str | None = None
    priorities: str | None = None
    folder: Path | None = None
    arrivals: str | None = None
    change: Callable[[Trace, int], Trace] | None = None


@dataclass(frozen=True, slots=True)
class FittedTrace:
    """A trace that fits the engines.

    Attributes:
        dropped: requests left out, because no engine can hold their prompt and one token.
        clipped: requests whose output ends at the engine's context limit, as in vLLM.
    """

    trace: Trace
    dropped: int
    clipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disclosure:
    """Information about requests that the scheduler receives.

    Attributes:
        output_known: whether `max_tokens` states the true length of the output; otherwise it is absent.
        queue_timeout_s: maximum queue time; infinite by default, so that all policies do the same work.
        model: the name that requests ask for.
    """

    output_known: bool = False
    queue_timeout_s: float = math.inf
    model: str = MODEL


@lru_cache(maxsize=8)
def choose_trace(choice: TraceChoice, seed: int) -> Trace:
    """Return the requests of one seed, at the trace's own rate.

    Raises:
        TraceError: there is no such trace, or it cannot be read.
    """
    trace = resolve(
        WorkloadSettings(
            trace=choice.name,
            requests=choice.requests,
            tenants=choice.tenants,
            priorities=choice.priorities,
            seed=seed,
            folder=choice.folder,
        )
    )
    if choice.change is not None:
        trace = choice.change(trace, seed)
    if choice.arrivals is not None:
        trace = with_arrivals(trace, choice.arrivals, stream(seed, "arrival pattern"))
    return trace


def fit(trace: Trace, max_model_len: int) -> FittedTrace:
    """Leave out requests that fit no engine, and end outputs where the engine would.

    Raises:
        TraceError: no request is left.
    """
    kept, clipped = [], 0
    for one in trace.requests:
        max_output_tokens = max_model_len - one.prompt_tokens
        if max_output_tokens < 1:
            continue
        is_clipped = one.output_tokens > max_output_tokens
        clipped += is_clipped
        kept.append(replace(one, output_tokens=max_output_tokens) if is_clipped else one)
    if not kept:
        raise TraceError(
            f"every prompt of {trace.name!r} exceeds the engines' context limit of {max_model_len:,} tokens"
        )
    dropped = len(trace.requests) - len(kept)
    if dropped or clipped:
        trace = replace(trace, requests=tuple(kept))
    return FittedTrace(trace, dropped, clipped)


def at_rate(trace: Trace, rate_per_s: float | None) -> Trace:
    """Scale the trace in time to a rate; None keeps its own."""
    return trace if rate_per_s is None else scale_to_rate(trace, rate_per_s)


def requests_of(trace: Trace, disclosure: Disclosure, block_size: int) -> Iterator[SimulatedRequest]:
    """Yield the requests of a run in the order of arrival, hashed by KV blocks of `block_size` tokens."""
    for number, one in enumerate(trace.requests):
        yield SimulatedRequest(
            Request(
                submission=Submission(
                    request_id=f"r{number}",
                    spec=RequestSpec(
                        model=disclosure.model,
                        shape=PromptShape(text_bytes=0, prompt_tokens=one.prompt_tokens),
                        max_output_tokens=one.output_tokens if disclosure.output_known else None,
                        streamed=True,
                    ),
                    tenant=one.tenant,
                    priority=one.priority,
                    prefix=tuple(gateway_blocks(one.prefix, PREFIX_BLOCK_TOKENS, one.prompt_tokens)),
                ),
                gateway_id="g1",
                arrived_at=one.arrival_s,
                expires_at=one.arrival_s + disclosure.queue_timeout_s,
            ),
            output_tokens=one.output_tokens,
            block_hashes=tuple(engine_blocks(one.prefix, PREFIX_BLOCK_TOKENS, one.prompt_tokens, block_size)),
        )
