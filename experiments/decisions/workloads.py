"""Workloads of this experiment: generated requests at a rate, and the engines that serve them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve_app.lab.simulation.run import ONE_POOL, EngineChanges, FleetSettings
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import LognormalLengths, Trace, TraceRequest, UniformLengths, stream
from serve_app.request import PriorityClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and engines.

    Attributes:
        short_at_tokens: longest short prompt.
        draw: returns the requests of a seed, at a rate per second.
    """

    fleet: FleetSettings
    short_at_tokens: int
    draw: Callable[[int, float, int], Trace]


_Numbers = NDArray[np.int64]


def _trace(
    name: str,
    rate_per_s: float,
    prompts: _Numbers,
    outputs: _Numbers,
    rng: np.random.Generator,
    tenants: list[str] | None = None,
) -> Trace:
    """Return requests with Poisson arrivals."""
    times = np.cumsum(rng.exponential(1 / rate_per_s, len(prompts)))
    whose = tenants or ["default"] * len(prompts)
    requests = tuple(
        TraceRequest(arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(output), tenant=tenant)
        for at, prompt, output, tenant in zip(times, prompts, outputs, whose, strict=True)
    )
    return Trace(name=name, source=f"generated at {rate_per_s:.4g} requests/s", requests=requests)


def _lengths(mean: float, cv: float, max_tokens: int, count: int, rng: np.random.Generator) -> _Numbers:
    return LognormalLengths(mean=mean, cv=cv, max_tokens=max_tokens).sample(count, rng)


def _tenants(seed: int, rate_per_s: float, count: int) -> Trace:
    """Three heavy tenants with longer answers and 60 % of the requests, and 24 light ones."""
    rng = stream(seed, "decisions tenants")
    heavy = rng.random(count) < 0.6
    number = np.where(heavy, rng.integers(3, size=count), rng.integers(24, size=count))
    prompts = np.where(heavy, _lengths(220, 1, 3_000, count, rng), _lengths(120, 1, 1_500, count, rng))
    outputs = np.where(heavy, _lengths(330, 1, 2_000, count, rng), _lengths(150, 1, 1_000, count, rng))
    names = [f"{'heavy' if one else 'light'} {place}" for one, place in zip(heavy, number, strict=True)]
    return _trace("tenants", rate_per_s, prompts, outputs, rng, names)


def _long_prompts(seed: int, rate_per_s: float, count: int) -> Trace:
    """Prompts with a heavy tail up to 131,072 tokens, with the mean of Mooncake's conversations (12,000)."""
    rng = stream(seed, "decisions long prompts")
    drawn = np.exp(rng.normal(math.log(6_500), 1.15, count))
    prompts = np.clip(np.rint(drawn), 64, 130_000).astype(np.int64)
    outputs = np.minimum(_lengths(340, 1, 2_000, count, rng), 131_072 - prompts)
    return _trace("long prompts", rate_per_s, prompts, outputs, rng)


def _two_kinds(short: UniformLengths, long: UniformLengths, count: int, rng: np.random.Generator) -> _Numbers:
    """Draw lengths of which a fifth are long."""
    return np.where(rng.random(count) < 0.2, long.sample(count, rng), short.sample(count, rng))


def _mixed(seed: int, rate_per_s: float, count: int) -> Trace:
    """80 % of 50 to 300 tokens, 20 % of 2,000 to 6,000."""
    rng = stream(seed, "decisions mixed")
    prompts = _two_kinds(UniformLengths(50, 300), UniformLengths(2_000, 6_000), count, rng)
    return _trace("mixed", rate_per_s, prompts, _lengths(150, 0.7, 600, count, rng), rng)


def _paper(rng: np.random.Generator, rate_per_s: float, count: int) -> Trace:
    prompts = _two_kinds(UniformLengths(32, 256), UniformLengths(1_024, 4_096), count, rng)
    return _trace("paper-mix", rate_per_s, prompts, _lengths(100, 0.5, 512, count, rng), rng)


def _paper_mix(seed: int, rate_per_s: float, count: int) -> Trace:
    """The mix of the EWSJF paper."""
    return _paper(stream(seed, "decisions paper mix"), rate_per_s, count)


def _backlog(seed: int, rate_per_s: float, count: int) -> Trace:
    """A backlog of batch work of the paper's mix, and interactive requests of the same mix at the rate."""
    rng = stream(seed, "decisions backlog")
    jobs = _paper(rng, 1.0, count).requests
    requests = [replace(one, arrival_s=0.0, tenant="jobs", priority=PriorityClass.BATCH) for one in jobs]
    if rate_per_s:
        people = _paper(rng, rate_per_s, max(1, round(_BACKLOG_S * rate_per_s))).requests
        requests += [replace(one, tenant="people", priority=PriorityClass.INTERACTIVE) for one in people]
    requests.sort(key=lambda one: one.arrival_s)
    return Trace(name="backlog", source="generated", requests=tuple(requests))


def _classes(seed: int, rate_per_s: float, count: int) -> Trace:
    """The paper's mix, interactive except for a tenth of the requests."""
    rng = stream(seed, "decisions classes")
    requests = tuple(
        replace(one, tenant="program", priority=PriorityClass.DEFAULT)
        if rng.random() < 0.1
        else replace(one, tenant="people", priority=PriorityClass.INTERACTIVE)
        for one in _paper(rng, rate_per_s, count).requests
    )
    return Trace(name="classes", source="generated", requests=requests)


def _long_backlog(seed: int, rate_per_s: float, count: int) -> Trace:
    """A backlog of prompts of 2,000 to 12,000 tokens, all of which arrive within a second."""
    del rate_per_s
    rng = stream(seed, "decisions long backlog")
    prompts = UniformLengths(2_000, 12_000).sample(count, rng)
    return _trace("long backlog", float(count), prompts, _lengths(200, 0.7, 1_000, count, rng), rng)


def retried(simulated: SimulatedRequest, at: float) -> SimulatedRequest:
    """Return the retry of a rejected request, with another id and as long a queue timeout."""
    old = simulated.request
    again = replace(
        old,
        submission=msgspec.structs.replace(old.submission, request_id=f"{old.request_id}+"),
        arrived_at=at,
        expires_at=at + old.expires_at - old.arrived_at,
    )
    return replace(simulated, request=again, dispatch=None, dispatched_at=None, sequence=None)


# Interactive requests continue for as long as the backlog lasts, about.
_BACKLOG_S = 70.0


def _fleet(profile: str, replicas: int, engine: EngineChanges | None = None) -> FleetSettings:
    return FleetSettings(profile=profile, replicas={ONE_POOL: replicas}, engine=engine or EngineChanges())


_8B, _70B = "llama31-8b-rtx4090-tp1", "llama2-70b-h100-tp4"
WORKLOADS: Mapping[str, Workload] = {
    "tenants": Workload(fleet=_fleet(_8B, 1), short_at_tokens=512, draw=_tenants),
    "long prompts": Workload(
        fleet=_fleet(_70B, 2, EngineChanges(max_model_len=131_072)), short_at_tokens=2_048, draw=_long_prompts
    ),
    "mixed": Workload(
        fleet=_fleet(_8B, 2, EngineChanges(kv_tokens=60_000, max_model_len=8_192)),
        short_at_tokens=512,
        draw=_mixed,
    ),
    "paper-mix": Workload(fleet=_fleet(_70B, 4), short_at_tokens=512, draw=_paper_mix),
    "classes": Workload(fleet=_fleet(_70B, 4), short_at_tokens=512, draw=_classes),
    "backlog": Workload(fleet=_fleet(_70B, 4), short_at_tokens=512, draw=_backlog),
    "long backlog": Workload(fleet=_fleet(_70B, 2), short_at_tokens=512, draw=_long_backlog),
}
