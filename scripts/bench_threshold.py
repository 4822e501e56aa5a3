#!/usr/bin/env python
"""Does a `B_short` that adapts serve a drifting mix better than one that is fixed?

    .venv/bin/python scripts/bench_threshold.py          # configs/experiments/adaptive_b_short.yaml
    .venv/bin/python scripts/bench_threshold.py --scenarios flip --seeds 1 --out out/threshold.jsonl

The traffic is made of chats (lengths of a published trace) and of documents (lognormal prompts of some
thousand tokens). A scenario says of which mix they are, and which share of the requests are documents while
time goes on; the rate follows the share, so that the load stays what it is called. Engines are the same for
all variants, both pools have the context that their profile or the experiment gives them, and only the border
between them differs.

Load 1.0 is the rate at which the same replicas finish a backlog of the mix, first come first served.

Columns (means over the seeds ± 95 % interval; the first tenth of each run is not measured):

    attainment   share of requests with TTFT and TPOT within the limits of the experiment
    TTFT         p99 of all, of requests up to `short_at_tokens` of prompt, and of the others, in seconds
    TPOT p99     seconds
    spilled      share of requests that were served outside the pool that was their home
    moves        of the border in each run; last: where it stood at the end, in tokens
    vs           attainment of the adaptive border that is gated alike, less this one's, in percentage points
                 (paired differences, ± 95 % interval)

What it cannot show: prompts whose length is misjudged (they are exact here), pools that are scaled
meanwhile, and engines of different speed in the two pools.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import TypeAdapter

from serve_app.command import positive_float, positive_int, progress_bar
from serve_app.metrics.confidence import interval_95, paired_difference_95
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import Slo, slo_attainment_ratio
from serve_app.metrics.statistics import percentile
from serve_app.provenance import commit
from serve_app.routing.adaptive_b_short import BShortChanged
from serve_app.simulation.fleet import EngineChanges, FleetSettings, PoolChanges
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Decision, Simulation
from serve_app.simulation.workload import Disclosure, fit, requests_of
from serve_app.workloads.lengths import LognormalLengths
from serve_app.workloads.published import RECIPES
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import Trace, TraceRequest

_CONFIG = Path(__file__).resolve().parents[1] / "configs" / "experiments" / "adaptive_b_short.yaml"
_WARM_UP = 0.1
_BACKLOG = 2_000
_ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines of a table; `short_context` and `context` are their limits in tokens."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    profile: str
    pools: Mapping[str, int]
    loads: tuple[float, ...]
    short_context: int = 16_384
    context: int = 16_384

    def settings(self, b_short_tokens: int) -> FleetSettings:
        """The fleet with a border between its pools."""
        return FleetSettings(
            profile=self.profile,
            replicas=self.pools,
            b_short_tokens=b_short_tokens,
            engine=EngineChanges(max_model_len=self.context),
            by_pool={"short": PoolChanges(engine=EngineChanges(max_model_len=self.short_context))},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A border: where it is or begins, and scheduler settings by dotted path."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    b_short_tokens: int
    scheduler: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What lengths depend on.

    Attributes:
        chats: the recipe of their lengths.
        documents_mean, documents_cv: of the documents' prompts, in tokens.
        answers_mean: of the documents' answers, in tokens.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    chats: str = "lmsys"
    documents_mean: float = 5_000.0
    documents_cv: float = 0.8
    answers_mean: float = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Traffic.

    Attributes:
        documents: (share of the time, share of documents) points with straight lines between them.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    documents: tuple[tuple[float, float], ...]
    mix: Mix = field(default_factory=Mix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The whole table.

    Attributes:
        first_seed: the seeds count from here.
        duration_s: of one run.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    policy: str
    fleets: Mapping[str, Fleet]
    scenarios: Mapping[str, Scenario]
    variants: Mapping[str, Variant]
    seeds: int = 3
    first_seed: int = 0
    duration_s: float = 1_200.0
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    short_at_tokens: int = 1_024


@dataclass(frozen=True, slots=True)
class Run:
    """One cell and seed of the table."""

    fleet: str
    scenario: str
    load: float
    variant: str
    seed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of one run."""

    attainment: float
    ttft_p99_s: float
    short_ttft_p99_s: float
    long_ttft_p99_s: float
    tpot_p99_s: float
    spilled: float
    moves: int
    last_b_short: int
    requests: int
    borders: tuple[tuple[float, int], ...]


def main() -> int:
    """Play and print."""
    args = arguments()
    if args.read:
        print(table(read(args.read)))
        return 0
    experiment = TypeAdapter(Experiment).validate_python(yaml.safe_load(args.config.read_text()))
    if args.duration_s is not None:
        experiment = replace(experiment, duration_s=args.duration_s)
    first = experiment.first_seed if args.first_seed is None else args.first_seed
    runs = [
        Run(fleet, scenario, load, variant, seed)
        for fleet in args.fleets or experiment.fleets
        for scenario in args.scenarios or experiment.scenarios
        for load in args.loads or experiment.fleets[fleet].loads
        # Seed by seed, so that what there is of a table that was cut short can be compared.
        for seed in range(first, first + (args.seeds or experiment.seeds))
        for variant in args.variants or experiment.variants
    ]
    found: dict[Run, Figures] = {}
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"commit": commit(), "experiment": asdict(experiment)}) + "\n")
    with progress_bar("runs", len(runs)) as advance:
        for run, figures in zip(runs, played(experiment, runs, args.jobs), strict=True):
            found[run] = figures
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**asdict(run), **asdict(figures)}) + "\n")
            advance()
    print(table(found))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=_CONFIG, help="(%(default)s)")
    for name in ("fleets", "scenarios", "variants"):
        parser.add_argument(f"--{name}", nargs="+", help="only these (all)")
    parser.add_argument("--loads", type=float, nargs="+", help="instead of the fleet's own")
    parser.add_argument("--seeds", type=positive_int, help="(the experiment's)")
    parser.add_argument("--first-seed", type=int, help="(the experiment's)")
    parser.add_argument("--duration-s", type=positive_float, help="of one run (the experiment's)")
    parser.add_argument("--jobs", type=positive_int, default=1, help="processes (%(default)s)")
    parser.add_argument("--read", type=Path, nargs="+", help="print the table of files that --out wrote")
    parser.add_argument("--out", type=Path, help="write every run as a line of JSON")
    return parser.parse_args()


def played(experiment: Experiment, runs: Sequence[Run], jobs: int) -> Iterator[Figures]:
    """The figures of all runs, in their order."""
    if jobs == 1:
        yield from (play(experiment, run) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as processes:
        yield from processes.map(play, [experiment] * len(runs), runs)


def play(experiment: Experiment, run: Run) -> Figures:
    """One run, in figures."""
    fleet, variant = experiment.fleets[run.fleet], experiment.variants[run.variant]
    settings = fleet.settings(variant.b_short_tokens)
    trace = drifting(experiment, run)
    requests = list(requests_of(trace, Disclosure(), settings.plans()[0].engine.block_size))
    borders: list[tuple[float, int]] = []
    spilled = 0

    def look(decision: Decision) -> None:
        moved = (command for command in decision.commands if isinstance(command, BShortChanged))
        borders.extend((decision.at, move.b_short_tokens) for move in moved)

    scheduler = scheduler_settings(experiment.policy, settings.routing, variant.scheduler)
    world = Simulation(scheduler, settings.plans(isolated=True), on_decision=look)
    records = sorted(world.run(requests), key=lambda record: record.arrived_at)
    records = records[round(_WARM_UP * len(records)) :]
    spilled = sum(record.pool != home(record, borders, variant.b_short_tokens) for record in records)
    return figures_of(experiment, records, spilled, borders, variant.b_short_tokens)


def home(record: RequestRecord, borders: Sequence[tuple[float, int]], first: int) -> str:
    """The home of a request when it was dispatched."""
    at = record.dispatched_at if record.dispatched_at is not None else record.arrived_at
    border = next((border for since, border in reversed(borders) if since <= at), first)
    return "short" if (record.estimated_tokens or 0) <= border else "long"


def figures_of(
    experiment: Experiment,
    records: Sequence[RequestRecord],
    spilled: int,
    borders: list[tuple[float, int]],
    first: int,
) -> Figures:
    """The columns of the table."""
    slo = Slo(ttft_s=experiment.ttft_s, tpot_s=experiment.tpot_s)
    ttft = {True: list[float](), False: list[float]()}
    for record in records:
        if record.ttft_s is not None:
            ttft[record.prompt_tokens <= experiment.short_at_tokens].append(record.ttft_s)
    tpot = sorted(record.tpot_s for record in records if record.tpot_s is not None)
    return Figures(
        attainment=slo_attainment_ratio(records, slo) or 0.0,
        ttft_p99_s=percentile(sorted(ttft[True] + ttft[False]), 99),
        short_ttft_p99_s=percentile(sorted(ttft[True]), 99),
        long_ttft_p99_s=percentile(sorted(ttft[False]), 99),
        tpot_p99_s=percentile(tpot, 99),
        spilled=spilled / len(records),
        moves=len(borders),
        last_b_short=borders[-1][1] if borders else first,
        requests=len(records),
        borders=tuple(borders),
    )


def drifting(experiment: Experiment, run: Run) -> Trace:
    """The requests of a scenario: a Poisson stream whose rate keeps the load while the mix drifts."""
    fleet, scenario = experiment.fleets[run.fleet], experiment.scenarios[run.scenario]
    points = scenario.documents
    low, high = min(share for _, share in points), max(share for _, share in points)
    seconds_of = {share: seconds_each(fleet, scenario.mix, share) for share in {low, high}}
    rng = stream(run.seed, "arrivals and kinds")
    at, arrivals = 0.0, []
    while True:
        share = documents_share(points, at / experiment.duration_s)
        beyond = (share - low) / (high - low) if high > low else 0.0
        seconds = seconds_of[low] + beyond * (seconds_of[high] - seconds_of[low])
        at += float(rng.exponential(seconds / run.load))
        if at >= experiment.duration_s:
            break
        arrivals.append((at, bool(rng.random() < share)))
    return requests_as_trace(run.scenario, arrivals, run.seed, scenario.mix, fleet.context)


def documents_share(points: Sequence[tuple[float, float]], when: float) -> float:
    """The share of documents at a time; straight lines between the points."""
    for (t0, s0), (t1, s1) in itertools.pairwise(points):
        if when <= t1:
            return s0 if t1 == t0 else s0 + (s1 - s0) * (when - t0) / (t1 - t0)
    return points[-1][1]


def requests_as_trace(
    name: str, arrivals: Sequence[tuple[float, bool]], seed: int, of: Mix, context: int
) -> Trace:
    """Requests with lengths by their kind: True is a document."""
    chats = RECIPES[of.chats].lengths(len(arrivals), stream(seed, "chats"))
    rng = stream(seed, "documents")
    prompts = LognormalLengths(mean=of.documents_mean, cv=of.documents_cv, max_tokens=1_000_000).sample(
        len(arrivals), rng
    )
    outputs = LognormalLengths(mean=of.answers_mean, cv=0.6, max_tokens=2_048).sample(len(arrivals), rng)
    documents = (prompts, outputs)
    requests = []
    for place, (at, is_document) in enumerate(arrivals):
        kind = documents if is_document else chats
        output = int(kind[1][place])
        prompt = min(int(kind[0][place]), context - output - 1)
        requests.append(TraceRequest(arrival_s=at, prompt_tokens=prompt, output_tokens=output))
    trace = Trace(name=name, source=f"chats and documents, seed {seed}", requests=tuple(requests))
    return fit(trace, context).trace


@lru_cache(maxsize=64)
def _seconds_each(fleet_json: str, of: Mix, share: float) -> float:
    fleet = TypeAdapter(Fleet).validate_json(fleet_json)
    settings = fleet.settings(fleet.short_context)
    rng = stream(0, "backlog")
    arrivals = [(0.0, bool(rng.random() < share)) for _ in range(_BACKLOG)]
    trace = requests_as_trace("backlog", arrivals, 0, of, fleet.context)
    plans = settings.plans()
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    records = Simulation(scheduler_settings("fcfs", settings.routing, {}), plans).run(requests)
    ends = sorted(record.finished_at for record in records)
    # Without the filling and the emptying of the batches.
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (ends[last] - ends[first]) / (last - first)


def seconds_each(fleet: Fleet, of: Mix, share: float) -> float:
    """Seconds that the whole fleet needs for one request of a mix when it never runs out of work."""
    return _seconds_each(json.dumps(asdict(fleet)), of, share)


COLUMNS: tuple[tuple[str, Callable[[Figures], float], str], ...] = (
    ("attainment %", lambda f: 100 * f.attainment, ".1f"),
    ("TTFT p99", lambda f: f.ttft_p99_s, ".2f"),
    ("short", lambda f: f.short_ttft_p99_s, ".2f"),
    ("long", lambda f: f.long_ttft_p99_s, ".2f"),
    ("TPOT p99", lambda f: f.tpot_p99_s, ".3f"),
    ("spilled %", lambda f: 100 * f.spilled, ".1f"),
    ("moves", lambda f: f.moves, ".1f"),
    ("last", lambda f: f.last_b_short, ",.0f"),
)


def table(found: Mapping[Run, Figures]) -> str:
    """Markdown, a line for each fleet, scenario, load and variant."""
    lines = [f"| fleet | scenario | load | border | n | {' | '.join(name for name, _, _ in COLUMNS)} | vs |"]
    lines.append("|---" * (6 + len(COLUMNS)) + "|")
    cells: dict[tuple[str, str, float], dict[str, list[Figures]]] = {}
    for run, figures in found.items():
        cell = cells.setdefault((run.fleet, run.scenario, run.load), {})
        cell.setdefault(run.variant, []).append(figures)
    for (fleet, scenario, load), by_variant in cells.items():
        for variant, runs in by_variant.items():
            values = [written([of(figures) for figures in runs], digits) for _, of, digits in COLUMNS]
            rival = counterpart(variant)
            against = versus(runs, by_variant.get(rival)) if variant != rival else ""
            head = f"| {fleet} | {scenario} | {load:g} | {variant} | {len(runs)} "
            lines.append(f"{head}| {' | '.join(values)} | {against} |")
    return "\n".join(lines)


def counterpart(variant: str) -> str:
    """The adaptive variant that differs in the border alone: of `8K gated`, `adaptive gated`."""
    return " ".join([_ADAPTIVE, *variant.split()[1:]])


def versus(fixed: Sequence[Figures], adaptive: Sequence[Figures] | None) -> str:
    """By how much the adaptive border attains more, in percentage points."""
    if adaptive is None or len(adaptive) != len(fixed):
        return ""
    difference = paired_difference_95(
        [100 * figures.attainment for figures in adaptive], [100 * figures.attainment for figures in fixed]
    )
    half = "" if difference.high is None else f" ± {difference.high - difference.mean:.1f}"
    return f"{difference.mean:+.1f}{half}"


def written(values: Sequence[float], digits: str) -> str:
    """Mean ± half the interval."""
    interval = interval_95(values)
    mean = format(statistics.fmean(values), digits)
    if interval.high is None or math.isclose(interval.high, interval.mean):
        return mean
    return f"{mean} ± {format(interval.high - interval.mean, digits)}"


def read(paths: Sequence[Path]) -> dict[Run, Figures]:
    """The runs of earlier calls, from the files that `--out` wrote."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            values = json.loads(line)
            run = Run(**{field.name: values.pop(field.name) for field in fields(Run)})
            found[run] = Figures(**values)
    return found


if __name__ == "__main__":
    sys.exit(main())
