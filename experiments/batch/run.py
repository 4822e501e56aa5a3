"""What does a batch cost interactive requests, and how much of it is served?

Interactive requests with the paper's mix of lengths are simulated alone, and beside a batch that always has
400 requests to serve for each replica. Load 1.0 is the rate that saturates the same replicas under FCFS.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from experiments.batch.oracle import OracleSimulation
from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.common.rows import Key
from serve_app.cli.command import progress_bar
from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import (
    MODEL,
    ONE_POOL,
    Disclosure,
    FleetSettings,
    choose_trace,
    parallel,
    requests_of,
    saturated_rate_per_s,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation
from serve_app.lab.workloads import Trace, TraceChoice, scale_to_rate, stream
from serve_app.request import PriorityClass, PromptShape, Request, RequestSpec, Submission

# Requests of the batch that wait or run at any time, for each replica. More than any engine serves at once.
_BACKLOG = 400
# No request of the batch is longer than this.
_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 6_000, 3_000
_AIMD_INTERVAL_S = 1.0
_BATCH = "jobs"


@settings
class Scene:
    """Traffic.

    Attributes:
        profile: of the engines.
        load: of the interactive requests.
        arrivals: pattern of their arrivals, see `with_arrivals`; None for a Poisson process.
        prompt, output: mean and deviation of the logarithm of the batch's lengths in tokens.
    """

    profile: str
    load: float
    prompt: tuple[float, float]
    output: tuple[float, float]
    arrivals: str | None = None

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """Return prompt and output tokens of the batch's next request."""
        prompt_tokens = int(min(rng.lognormal(*self.prompt), _MAX_PROMPT_TOKENS)) + 1
        return prompt_tokens, int(min(rng.lognormal(*self.output), _MAX_OUTPUT_TOKENS)) + 2


@settings
class Case:
    """Treatment of the batch.

    Attributes:
        interactive: whether there are interactive requests.
        priority: class of the batch's requests; None leaves the batch out.
        revocable: whether running requests may be revoked.
        aimd: whether the number of submitted requests is increased by one each second, and halved if
            interactive requests take more than `aimd_tolerance` times as long per token as alone.
        scheduler: settings by dotted path.
        oracle: share by which an oracle may lengthen an iteration; None leaves the batch to the scheduler.
    """

    interactive: bool = True
    priority: PriorityClass | None = PriorityClass.BATCH
    revocable: bool = False
    aimd: bool = False
    scheduler: Mapping[str, Any] | None = None
    oracle: float | None = None


@settings
class Frontier:
    """Comparison of the scheduler with an oracle.

    Attributes:
        scenes: by their names.
        slowdowns: of the oracle.
        max_slowdowns: of the scheduler.
        seeds: others than those of the cases.
        span_s: duration of a run.
    """

    scenes: tuple[str, ...]
    slowdowns: tuple[float, ...]
    max_slowdowns: tuple[float, ...]
    seeds: tuple[int, ...]
    span_s: float


@settings
class BatchSettings:
    """Settings of the experiment.

    Attributes:
        seeds: runs of each case, with the seeds 0, 1, ...
        span_s: duration of a run; figures are from its last `1 - warm_up` part.
    """

    scenes: Mapping[str, Scene]
    cases: Mapping[str, Case]
    seeds: int
    span_s: float
    frontier: Frontier
    warm_up: float = 0.1
    replicas: int = 1
    aimd_tolerance: float = 1.1


Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a case; `tpot_alone_s` is the mean without a batch, which AIMD is given."""

    settings: BatchSettings
    scene: Scene
    case: Case
    seed: int
    tpot_alone_s: float = 0.0

    @property
    def fleet(self) -> FleetSettings:
        """The replicas."""
        return FleetSettings(profile=self.scene.profile, replicas={ONE_POOL: self.settings.replicas})


class Backlog:
    """A batch that submits a request when one ends, up to a number that AIMD may change."""

    def __init__(self, run: Run, simulation: Simulation, block_size: int) -> None:
        self._run, self._simulation, self._block_size = run, simulation, block_size
        self._rng = stream(run.seed, "batch")
        self._numbers = itertools.count()
        self._window = 1.0 if run.case.aimd else _BACKLOG * run.settings.replicas
        self._open = 0
        self._interactive: list[float] = []
        self._decided_at = 0.0
        self.requests: list[SimulatedRequest] = []

    def fill(self) -> None:
        """Submit requests up to the window."""
        simulation = self._simulation
        while self._open < int(self._window) and simulation.timeline.now < self._run.settings.span_s:
            self._open += 1
            self.requests.append(self._next())
            simulation.submit(self.requests[-1])

    def on_end(self, _simulated: SimulatedRequest, record: RequestRecord) -> None:
        """Count the end of any request."""
        if record.tenant == _BATCH:
            self._open -= 1
        elif record.tpot_s is not None:
            self._interactive.append(record.tpot_s)
        now = self._simulation.timeline.now
        if self._run.case.aimd and self._interactive and now - self._decided_at >= _AIMD_INTERVAL_S:
            limit_s = self._run.settings.aimd_tolerance * self._run.tpot_alone_s
            is_slow = fmean(self._interactive) > limit_s
            self._window = max(1.0, self._window / 2) if is_slow else self._window + 1
            self._interactive, self._decided_at = [], now
        self.fill()

    def _next(self) -> SimulatedRequest:
        number, case, now = next(self._numbers), self._run.case, self._simulation.timeline.now
        assert case.priority is not None
        prompt_tokens, output_tokens = self._run.scene.draw(self._rng)
        blocks = (prompt_tokens + output_tokens) // self._block_size
        submission = Submission(
            request_id=f"b{number}",
            spec=RequestSpec(model=MODEL, shape=PromptShape(text_bytes=0, prompt_tokens=prompt_tokens)),
            tenant=_BATCH,
            priority=case.priority,
            revocable=case.revocable,
        )
        return SimulatedRequest(
            Request(submission=submission, gateway_id="g1", arrived_at=now),
            output_tokens=output_tokens,
            # Engines cache the blocks of a revoked request, as of any other.
            block_hashes=tuple(hash((number, block)) for block in range(blocks)),
        )


def play(settings: BatchSettings, context: Context) -> Iterator[Measurement]:
    """Measure every case of every scene."""
    seeds = range(settings.seeds)
    cells = []
    for name, scene in settings.scenes.items():
        alone = [0.0 for _ in seeds]
        if any(case.aimd for case in settings.cases.values()):
            runs = [Run(settings, scene, Case(priority=None), seed) for seed in seeds]
            alone = [one["tpot_mean_s"] for one in parallel(figures, runs, context.jobs)]
        cells += [
            Cell(
                key={"scene": name, "case": case_name},
                runs=[Run(settings, scene, case, seed, alone[seed] if case.aimd else 0.0) for seed in seeds],
                seeds=seeds,
                traces=generated("paper-mix"),
                settings=as_json(replace(settings, scenes={name: scene}, cases={case_name: case})),
            )
            for case_name, case in settings.cases.items()
        ]
    yield from play_cells("batch", cells, figures, context)
    yield from _frontier(settings, context)


def _frontier(settings: BatchSettings, context: Context) -> Iterator[Measurement]:
    frontier = settings.frontier
    of_runs = replace(settings, span_s=frontier.span_s)
    cases = {("oracle", slowdown): Case(oracle=slowdown) for slowdown in frontier.slowdowns} | {
        ("backfill", most): Case(revocable=True, scheduler={"backfill.max_slowdown": most})
        for most in frontier.max_slowdowns
    }

    def played(name: str, case: Case) -> list[Figures]:
        runs = [Run(of_runs, settings.scenes[name], case, seed) for seed in frontier.seeds]
        return list(parallel(figures, runs, context.jobs))

    with progress_bar("frontier", len(frontier.scenes) * len(cases)) as advance:
        for name in frontier.scenes:
            alone, only = played(name, Case(priority=None)), played(name, Case(interactive=False))
            for (batch, slowdown), case in cases.items():
                key: Key = {"frontier": name, "batch": batch, "slowdown": slowdown}
                if not context.has(key):
                    found = played(name, case)
                    yield Measurement(
                        key=key,
                        figures={
                            **{f"{figure}_factor": _ratios(figure, found, alone) for figure in _COMPARED},
                            "share": _ratios(_THROUGHPUT, found, only),
                        },
                        seeds=frontier.seeds,
                        traces=generated("paper-mix"),
                        settings=as_json(
                            replace(of_runs, scenes={name: settings.scenes[name]}, cases={batch: case})
                        ),
                    )
                advance()


_THROUGHPUT = "batch_tokens_per_s"
_COMPARED = ("tpot_mean_s", "tpot_p99_s", "ttft_p50_s", "ttft_p99_s")


def _ratios(name: str, runs: Sequence[Figures], others: Sequence[Figures]) -> list[float]:
    return [one[name] / other[name] for one, other in zip(runs, others, strict=True)]


def figures(run: Run) -> Figures:
    """Simulate one run, and return its figures."""
    plans = run.fleet.plans(isolated=True)
    block_size = plans[0].engine.block_size
    scheduler = scheduler_settings("ewsjf", run.fleet.routing, run.case.scheduler or {})
    if run.case.oracle is not None:
        return _oracle_figures(run, scheduler, plans)
    simulation = Simulation(scheduler, plans)
    backlog = Backlog(run, simulation, block_size)
    if run.case.priority is not None:
        simulation.on_end = backlog.on_end
        backlog.fill()
    trace = interactive(run)
    records = simulation.run(
        list(requests_of(trace, Disclosure(), block_size)) if run.case.interactive else []
    )
    ended = [(one.finished_at, one.output_tokens) for one in records if one.tenant == _BATCH]
    computed = sum(one.prompt_tokens + one.output_tokens for one in backlog.requests)
    return {
        **_summary(run, records, ended),
        "revoked": sum(one.revocations for one in backlog.requests),
        "recomputed": sum(one.recomputed_tokens for one in backlog.requests) / max(1, computed),
    }


def _oracle_figures(run: Run, scheduler: SchedulerSettings, plans: Sequence[ReplicaPlan]) -> Figures:
    assert run.case.oracle is not None
    if len(plans) != 1:
        raise SettingsError(f"the oracle serves one replica, got {len(plans)}: set replicas to 1")
    simulation = OracleSimulation(
        scheduler,
        plans[0],
        lengths=partial(run.scene.draw, stream(run.seed, "batch")),
        slowdown=run.case.oracle,
        until=run.settings.span_s,
    )
    records = simulation.run(list(requests_of(interactive(run), Disclosure(), plans[0].engine.block_size)))
    return _summary(run, records, simulation.ended)


def _summary(run: Run, records: Sequence[RequestRecord], batch: Sequence[tuple[float, int]]) -> Figures:
    """Return the figures that all runs have.

    Args:
        batch: end and output tokens of the batch's requests.
    """
    first_s, span_s = run.settings.warm_up * run.settings.span_s, run.settings.span_s
    people = [one for one in records if one.tenant != _BATCH and first_s <= one.arrived_at < span_s]
    ended = [tokens for ended_at, tokens in batch if first_s <= ended_at < span_s]
    ttft = Distribution.of([one.ttft_s for one in people if one.ttft_s is not None])
    tpot = Distribution.of([one.tpot_s for one in people if one.tpot_s is not None])
    return {
        "ttft_p50_s": ttft.p50 or 0.0,
        "ttft_p99_s": ttft.p99 or 0.0,
        "tpot_mean_s": tpot.mean or 0.0,
        "tpot_p99_s": tpot.p99 or 0.0,
        "batch_per_s": len(ended) / (span_s - first_s),
        _THROUGHPUT: sum(ended) / (span_s - first_s),
    }


def interactive(run: Run) -> Trace:
    """Return the interactive requests of a run."""
    scene, span_s = run.scene, run.settings.span_s
    whole = TraceChoice(name="paper-mix", requests=4_000)
    rate = scene.load * saturated_rate_per_s(run.fleet, whole, run.seed)
    choice = TraceChoice(name="paper-mix", requests=max(2, round(rate * span_s)), arrivals=scene.arrivals)
    trace = scale_to_rate(choose_trace(choice, run.seed), rate)
    requests = tuple(replace(one, priority=PriorityClass.INTERACTIVE) for one in trace.requests)
    return replace(trace, requests=requests)


EXPERIMENT = Experiment(settings=BatchSettings, play=play)
