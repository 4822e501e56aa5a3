"""Grid of simulated runs: policies by cases, profiles, loads and seeds, one row for each cell."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Annotated, Any

import numpy as np

from experiments.common.experiment import Context, Measurement, over_seeds
from experiments.common.provenance import trace_sources
from experiments.common.rows import Key
from serve_app.cli.command import progress_bar, warn
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator
from serve_app.core.settings_base import at_least, settings
from serve_app.lab.simulation.report import run_as_json, settings_as_json, unequal_work
from serve_app.lab.simulation.run import (
    ONE_POOL,
    EngineChanges,
    FleetSettings,
    RunResult,
    RunSettings,
    SloByLength,
    policy_names,
    run_all,
    saturated_rates,
)
from serve_app.lab.simulation.simulation import SimulatedRequest, SimulationSettings
from serve_app.lab.workloads import Trace, TraceChoice, TraceError, TraceRequest, plain_stream, stream
from serve_app.request import Request
from serve_app.tuning import LearnedPartitions, RefineAndPruneSettings, StrategicSettings

# Disturbances: wrong estimates of prompt lengths, and a mix that changes half-way


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthNoise:
    """Error of estimated prompt lengths.

    Attributes:
        relative_error: standard deviation of the logarithm of estimate over truth: at 0.3, two of three
            estimates are between 0.74 and 1.35 times the truth. The median estimate is right. 0 is exact.
    """

    relative_error: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.relative_error < math.inf:
            raise ValueError(f"relative_error must be 0 (exact) or more, got {self.relative_error}")

    def estimator(
        self, settings: EstimatorSettings, requests: Sequence[SimulatedRequest], seed: int
    ) -> TokenEstimator:
        """Return an estimator with this error."""
        ids = (simulated.request.request_id for simulated in requests)
        return NoisyEstimator(settings, self.factors(ids, plain_stream(seed, "length noise")))

    def factors(self, request_ids: Iterable[str], rng: Random) -> dict[str, float]:
        """Return estimate over truth for each request, drawn in the order given."""
        return {one: math.exp(rng.gauss(0.0, self.relative_error)) for one in request_ids}


class NoisyEstimator(TokenEstimator):
    """Estimator that multiplies each exact prompt length by the request's factor: estimate over truth."""

    def __init__(self, settings: EstimatorSettings, factors: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._factors = factors

    def estimate(self, request: Request) -> TokenEstimate:
        """Return the exact estimate, times the factor of the request."""
        exact = super().estimate(request)
        factor = self._factors[request.request_id]
        seen = max(1, round(exact.expected_prompt_tokens * factor))
        # A real estimator's lower bound is below the truth, so that no request that fits is rejected.
        least = min(seen, exact.least_prompt_tokens)
        return replace(exact, prompt_tokens=seen, expected_prompt_tokens=seen, least_prompt_tokens=least)


@dataclass(frozen=True, slots=True)
class FlippedMix:
    """Exchange of the shares of short and long prompts in the second half of a trace.

    Attributes:
        short_at_tokens: longest prompt that counts as short.
    """

    short_at_tokens: int

    def __call__(self, trace: Trace, seed: int) -> Trace:
        """Return the trace of a seed with the exchange.

        Raises:
            TraceError: all prompts are of one kind.
        """
        rng, limit = stream(seed, "flip"), self.short_at_tokens
        short = [one for one in trace.requests if one.prompt_tokens <= limit]
        long = [one for one in trace.requests if one.prompt_tokens > limit]
        if not short or not long:
            raise TraceError(
                f"cannot flip the mix: all prompts of {trace.name!r} are on one side of {limit} tokens"
            )
        middle = len(trace.requests) // 2
        flipped = trace.requests[:middle] + tuple(
            _sized_like(one, long if one.prompt_tokens <= limit else short, rng)
            for one in trace.requests[middle:]
        )
        source = f"{trace.source}, mix flipped from request {middle:,} on"
        return replace(trace, requests=flipped, source=source)


def _sized_like(one: TraceRequest, models: list[TraceRequest], rng: np.random.Generator) -> TraceRequest:
    model = models[int(rng.integers(len(models)))]
    return replace(
        one, prompt_tokens=model.prompt_tokens, output_tokens=model.output_tokens, prefix=model.prefix
    )


@settings
class PolicyVariant:
    """A policy with its settings.

    Attributes:
        policy: its name; the variant's own name unless given.
        engine: changes to every engine.
        scheduler: settings by dotted path.
        refine_and_prune: how queues are learned, if they are; None is the default.
    """

    policy: str = ""
    engine: EngineChanges = field(default_factory=EngineChanges)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    refine_and_prune: RefineAndPruneSettings | None = None

    @property
    def partition(self) -> LearnedPartitions:
        """Return how queues are learned."""
        return LearnedPartitions(
            StrategicSettings(refine_and_prune=self.refine_and_prune or RefineAndPruneSettings())
        )


@settings
class PolicyCase:
    """Traffic and fleet.

    Attributes:
        loads: shares of the saturated rate.
        name: in the table; the trace's name unless given.
        profiles, variants: subsets of the grid's; empty for all.
        requests, replicas: None for the grid's numbers.
        short_at_tokens: longest prompt that counts as short, in the figures only.
        length_noise: see `LengthNoise`.
        flip_mix: exchange the shares of short and long prompts half-way.
    """

    trace: str
    loads: tuple[float, ...]
    name: str = ""
    profiles: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    requests: int | None = None
    replicas: int | None = None
    short_at_tokens: int = 256
    tenants: str | None = None
    arrivals: str | None = None
    flip_mix: bool = False
    length_noise: float = 0.0
    world: SimulationSettings = field(default_factory=SimulationSettings)

    @property
    def title(self) -> str:
        """Return the name in the table."""
        return self.name or self.trace


@settings
class PolicyGrid:
    """All runs of an experiment.

    Attributes:
        profiles: engine profiles.
        replicas: engines in one pool.
        variants: policies, by their names in the table.
        seeds: runs of each, with the seeds 0, 1, ...
        requests: in each run, unless the case has a number.
    """

    profiles: tuple[str, ...]
    variants: Mapping[str, PolicyVariant]
    cases: tuple[PolicyCase, ...]
    replicas: int = 4
    seeds: Annotated[int, at_least(1)] = 5
    requests: Annotated[int, at_least(1)] = 20_000

    def __post_init__(self) -> None:
        if not (self.profiles and self.variants and self.cases):
            raise ValueError("a grid needs at least one profile, one variant and one case")
        for name, variant in self.variants.items():
            if (variant.policy or name) not in policy_names():
                raise ValueError(f"variant {name!r} has no policy: choose one of {', '.join(policy_names())}")
        for case in self.cases:
            for name in case.variants:
                if name not in self.variants:
                    raise ValueError(f"the grid has no variant {name!r}: it has {', '.join(self.variants)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """A line of the table: one variant in one case at one load, on one profile."""

    case: PolicyCase
    profile: str
    load: float
    variant: str

    @property
    def key(self) -> Key:
        """Return the key of its row."""
        return {
            "case": self.case.title,
            "profile": self.profile,
            "load": self.load,
            "policy": self.variant,
        }


def cells_of(grid: PolicyGrid) -> Iterator[GridCell]:
    """Return all cells, in the order of the table."""
    for case in grid.cases:
        for profile in case.profiles or grid.profiles:
            for load in case.loads:
                for variant in case.variants or grid.variants:
                    yield GridCell(case=case, profile=profile, load=load, variant=variant)


def planned(grid: PolicyGrid, cells: list[GridCell], *, jobs: int) -> list[list[RunSettings]]:
    """Return the runs of each cell, one per seed, at their rates; load 1.0 is measured first.

    All variants of a case get the same requests at the same times: a variant's engine changes do not affect
    the rate.
    """
    bare = PolicyVariant(policy="fcfs")
    references = [_run(grid, cell, bare, seed) for cell in cells for seed in range(grid.seeds)]
    rates = iter(saturated_rates(references, jobs=jobs))
    plan = []
    for cell in cells:
        runs = [_run(grid, cell, grid.variants[cell.variant], seed) for seed in range(grid.seeds)]
        plan.append([replace(run, load=cell.load, rate_per_s=cell.load * next(rates)) for run in runs])
    return plan


def _run(grid: PolicyGrid, cell: GridCell, variant: PolicyVariant, seed: int) -> RunSettings:
    case = cell.case
    return RunSettings(
        policy=variant.policy or cell.variant,
        label=cell.variant,
        fleet=FleetSettings(
            profile=cell.profile, replicas={ONE_POOL: case.replicas or grid.replicas}, engine=variant.engine
        ),
        trace=TraceChoice(
            name=case.trace,
            requests=case.requests or grid.requests,
            tenants=case.tenants,
            arrivals=case.arrivals,
            change=FlippedMix(case.short_at_tokens) if case.flip_mix else None,
        ),
        seed=seed,
        estimator=LengthNoise(relative_error=case.length_noise) if case.length_noise else None,
        simulation=case.world,
        scheduler=variant.scheduler,
        partition=variant.partition,
        slo=SloByLength(short_at_tokens=case.short_at_tokens),
        short_at_tokens=case.short_at_tokens,
    )


def play_grid(grid: PolicyGrid, context: Context) -> Iterator[Measurement]:
    """Measure every cell without a row."""
    cells = [cell for cell in cells_of(grid) if not context.has(cell.key)]
    plan = planned(grid, cells, jobs=context.jobs)
    results = run_all([run for runs in plan for run in runs], jobs=context.jobs)
    with progress_bar("policies", len(cells)) as advance:
        for cell, runs in zip(cells, plan, strict=True):
            yield measurement_of(cell.key, cell.case.trace, list(islice(results, len(runs))))
            advance()


def measurement_of(key: Key, trace: str, results: Sequence[RunResult]) -> Measurement:
    """Return the row of a cell, with the figures of all its seeds."""
    rows = [run_as_json(result) for result in results]
    for line in unequal_work(rows):
        warn(f"not the same work: {dict(key)}: {line}")
    return Measurement(
        key=key,
        seeds=[result.settings.seed for result in results],
        traces=trace_sources(trace),
        figures=over_seeds([_figures(row) for row in rows])
        | {"deployable": all(row["deployable"] for row in rows)},
        settings=_settings(results[0]),
    )


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    metrics, whole = row["metrics"], row["whole_run"]
    return {
        "rate_per_s": row["rate_per_s"],
        "requests": whole["requests"],
        "completed": whole["completed"],
        **{
            f"{size}_ttft_{name}_s": metrics["ttft_s"][size][name]
            for size in ("short", "long")
            for name in ("mean", "p50", "p99")
        },
        "queue_wait_max_s": metrics["queue_wait_s"]["all"]["max"],
        "tpot_mean_s": metrics["tpot_s"]["all"]["mean"],
        "goodput_per_s": metrics["goodput_per_s"],
        "tokens_per_s": whole["throughput_tokens_per_s"],
        "preemptions": whole["preemptions"],
    }


def _settings(result: RunResult) -> dict[str, Any]:
    """Return all settings of the cell's runs; those that differ between seeds are among the figures."""
    settings = settings_as_json(result)
    for of_seed in ("seed", "rate_per_s"):
        del settings[of_seed]
    # The pool's engines are identical.
    settings["engines"] = settings["engines"][:1]
    return settings
