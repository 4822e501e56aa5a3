"""How many replica-seconds does autoscaling save, and at what price?

Two simulated pools get traffic that changes. The production rule scales them. It is compared with Ray Serve's
default policy and two fixed fleets: our rule's peak number of replicas, and the mean number that it paid for.
Engines take half a minute, two or ten minutes to start.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import call
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.common.provenance import generated, trace_sources
from experiments.scaling.rules import (
    ScaledFleet,
    ScaledSimulation,
    ScalingRule,
    ServeDefault,
    fixed,
    work_rule,
)
from serve_app.cli.command import progress_bar
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import percentile, slo_attainment_ratio
from serve_app.core.scaling import AutoscalingSettings
from serve_app.core.settings_base import settings
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import (
    Disclosure,
    FleetSettings,
    SloByLength,
    choose_trace,
    parallel,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import Simulation, SimulationSettings
from serve_app.lab.workloads import OnOffArrivals, Trace, TraceChoice, TraceRequest, stream

# Traffic that changes: steps of either kind, bursts, a wave, an hour of Azure's own arrivals


# Multiples of the base rates of short and long requests, one phase after another.
STEPS = ((1.0, 1.0), (4.0, 1.0), (1.0, 1.0), (1.0, 4.0), (1.0, 1.0), (0.0, 0.0))
# Copies of Azure's hour, so that several replicas are needed; each copy is shifted a little.
_COPIES, _SPREAD_S = 2, 10.0
# Context of the engines for long requests.
_CONTEXT = 16_384

Times = NDArray[np.float64]


def steps(seed: int, span_s: float, base: float, kind: int = 0) -> Times:
    """Return Poisson arrivals of a kind whose rate changes with each phase; `base` is that of multiple 1."""
    return _poisson(
        lambda at_s: base * STEPS[_phase(at_s, span_s)][kind], 4 * base, span_s, seed + 1_000 * kind
    )


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
    short, long = _SHORT[name](seed, span_s, 3.0), steps(seed, span_s, 0.25, kind=1)
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


REACTING = "work, reacting"
SERVE, PEAK, MEAN = "Serve's default", "fixed, at the peak", "fixed, at the mean"

# Replicas report five times per second; once is enough for decisions once per second, and runs faster.
_SURROUNDINGS = SimulationSettings(report_interval_s=1.0)


@settings
class Scaling:
    """Settings of the experiment.

    Attributes:
        b_short_tokens: the border of the pools.
        span_s: duration of arrivals.
        start_s: start times of an engine.
        target_ongoing_requests: of Serve's default policy.
    """

    profile: str
    b_short_tokens: int
    span_s: float
    seeds: int
    cases: tuple[str, ...]
    start_s: tuple[float, ...]
    max_replicas: int
    downscale_delay_s: float
    target_ongoing_requests: float


def play(experiment: Scaling, context: Context) -> Iterator[Measurement]:
    """Measure every case, start time and rule without a row."""
    seeds = range(experiment.seeds)
    pairs = [(case, start_s) for case in experiment.cases for start_s in experiment.start_s]
    with progress_bar("scaling", len(pairs)) as advance:
        for case, start_s in pairs:
            if not context.has({"case": case, "start_s": start_s, "rule": REACTING}):
                runs = [partial(_all_rules, experiment, case, start_s, seed) for seed in seeds]
                found = list(parallel(call, runs, context.jobs))
                for rule in found[0]:
                    is_azure = case == "azure"
                    yield Measurement(
                        key={"case": case, "start_s": start_s, "rule": rule},
                        seeds=seeds,
                        traces=trace_sources("azure-conv+azure-code") if is_azure else generated(case),
                        figures=over_seeds([one[rule] for one in found]),
                    )
            advance()


def _all_rules(experiment: Scaling, case: str, start_s: float, seed: int) -> dict[str, dict[str, Any]]:
    """Return the figures of all rules, which get the same requests."""
    trace = traffic(case, seed, experiment.span_s, short_at=experiment.b_short_tokens)
    figures = partial(_figures, experiment, trace, start_s)
    bounds = AutoscalingSettings(
        min_replicas=1,
        max_replicas=experiment.max_replicas,
        downscale_delay_s=experiment.downscale_delay_s,
    )
    pools = tuple(_kinds(experiment))
    first = dict.fromkeys(pools, 1)
    found = {REACTING: figures(work_rule(pools, bounds), first)}
    serve = ServeDefault(experiment.target_ongoing_requests, bounds, first)
    found[SERVE] = figures(serve, first)
    ours = found[REACTING]
    end_s = ours["end_s"]
    mean = {pool: max(1, round(ours["replica_s"][pool] / end_s)) for pool in pools}
    found[PEAK] = figures(fixed, ours["peak"])
    found[MEAN] = figures(fixed, mean)
    return found


def _figures(
    experiment: Scaling, trace: Trace, start_s: float, rule: ScalingRule, first: Mapping[str, int]
) -> dict[str, Any]:
    fleet = _fleet(experiment)
    simulation = Simulation(scheduler_settings("ewsjf", fleet.routing, {}), [], _SURROUNDINGS)
    scaled = ScaledSimulation(
        simulation,
        ScaledFleet(kinds=_kinds(experiment), first=first, rule=rule, start_s=start_s),
    )
    scaled.run(list(requests_of(trace, Disclosure(queue_timeout_s=600.0), 16)))
    records = simulation.records
    short = [one for one in records if one.prompt_tokens < experiment.b_short_tokens]
    long = [one for one in records if one.prompt_tokens >= experiment.b_short_tokens]
    pools = tuple(fleet.replicas)
    return {
        "requests": len(records),
        "not_completed": sum(one.outcome is not Outcome.COMPLETED for one in records),
        "attained": _attained(records, experiment),
        "short_attained": _attained(short, experiment),
        "long_attained": _attained(long, experiment),
        "short_ttft_p99_s": _p99(short),
        "long_ttft_p99_s": _p99(long),
        "replica_s": scaled.replica_seconds(),
        "all_replica_s": sum(scaled.replica_seconds().values()),
        "peak": {pool: max(size.paid for size in scaled.sizes if size.pool == pool) for pool in pools},
        "end_s": simulation.timeline.now,
    }


def _attained(records: Sequence[RequestRecord], experiment: Scaling) -> float | None:
    return slo_attainment_ratio(records, SloByLength(short_at_tokens=experiment.b_short_tokens))


def _p99(records: Sequence[RequestRecord]) -> float | None:
    """Return the P99 of TTFT; a request without a first token counts with its whole time."""
    times = sorted(
        one.ttft_s if one.ttft_s is not None else one.finished_at - one.arrived_at for one in records
    )
    return percentile(times, 99) if times else None


def _fleet(experiment: Scaling) -> FleetSettings:
    return FleetSettings(
        profile=experiment.profile,
        replicas={"short": 1, "long": 1},
        b_short_tokens=experiment.b_short_tokens,
    )


def _kinds(experiment: Scaling) -> dict[str, Any]:
    return {plan.pool: plan for plan in _fleet(experiment).plans(isolated=True)}


EXPERIMENT = Experiment(settings=Scaling, play=play)
