#!/usr/bin/env python
"""Do two pools save GPUs? The papers' tables beside ours, and the closed forms against simulation.

    .venv/bin/python scripts/bench_planning.py published
    .venv/bin/python scripts/bench_planning.py cases --out out/cases.jsonl [--only NAME,...]
    .venv/bin/python scripts/bench_planning.py grid --out out/grid.jsonl

`published` simulates nothing: it computes the papers' tables again with the papers' own engine model, where
slots are reserved for the longest context, beside the figures that they print. `alpha implied` is the share
of short requests that their closed form needs with the rates per instance that they state.

`cases` runs the planner on each case of the experiment file, which is `python -m serve_app plan` with a file
of arguments: the project's scheduler in the project's simulator, physical engine profiles, and both
baselines. `grid` does the same on synthetic mixes of short and long requests, and sets the closed forms
beside what the simulation says.

Columns: savings are shares of cost per hour. `alpha` is the share of short requests, `w_s` their share of the
work, `by requests` is alpha * (1 - 1/rho), `by work` is w_s * (1 - 1/rho), `both pools` also counts what the
long pool gains or loses. `+-` is one replica of the fleets that were simulated: nothing finer can be told.

What it cannot show: real engines (see `calibrate`), and loads that change while the fleet stays as it is.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.command import positive_int, progress_bar
from serve_app.errors import ServeAppError, SettingsError
from serve_app.metrics.slo import Slo
from serve_app.planning.costs import CostTable
from serve_app.planning.model.closed_form import request_share_saving, work_share, work_share_saving
from serve_app.planning.model.length_mix import LengthMix
from serve_app.planning.model.paper_model import A100, PaperEngine
from serve_app.planning.plan import Effort, make_plan
from serve_app.planning.results import plan_as_json
from serve_app.planning.sizing.candidates import FleetOptions
from serve_app.planning.sizing.verification import Workload
from serve_app.provenance import commit, hardware, load_average
from serve_app.simulation.workload import TraceChoice, choose_trace
from serve_app.workloads.streams import stream

# Requests per second of one instance of 2604.08075: of the short pool, and of one undivided or long.
PRINTED_SHORT_RATE, PRINTED_WHOLE_RATE = 11.2, 2.8

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_EXPERIMENT = ROOT / "configs" / "experiments" / "planning.yaml"

Row = dict[str, Any]
_STRICT: Mapping[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan; fields as the arguments of `python -m serve_app plan`."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    name: str
    trace: str
    profile: str
    rate_per_s: float
    ttft_s: float = 2.0
    tpot_s: float = 0.08
    short_profiles: tuple[str, ...] = ()
    long_profiles: tuple[str, ...] = ()
    b_short_tokens: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    worst_case_slots: int | None = None
    output_known: bool = False
    variants: bool = True
    candidates: int = 2
    requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Mixes of two kinds of requests, every combination; lengths are means, drawn uniformly around them.

    Attributes:
        long_ratios: shares of long requests.
        short, long: prompt and output tokens.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    profile: str
    rate_per_s: float
    long_ratios: tuple[float, ...]
    short: tuple[tuple[int, int], ...]
    long: tuple[tuple[int, int], ...]
    ttft_s: float = 2.0
    tpot_s: float = 0.08
    short_profiles: tuple[str, ...] = ()
    worst_case_slots: int | None = None
    requests: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningExperiment:
    """The file."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    cases: tuple[Case, ...]
    grid: Grid
    seeds: int = 3
    stand_in_replicas: int = 16
    published: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)


def main() -> int:
    """Do what is asked for."""
    args = arguments()
    try:
        experiment = load(args.experiment)
        if args.what == "published":
            print(published_table(experiment))
            return 0
        cases = list(grid_cases(experiment.grid, args.out)) if args.what == "grid" else experiment.cases
        rows = list(played(chosen(cases, args.only), experiment, args))
    except (ServeAppError, ValueError) as exc:
        print(f"bench_planning: {exc}", file=sys.stderr)
        return 2
    print(table(rows))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("published", "cases", "grid"))
    parser.add_argument("--experiment", type=Path, default=DEFAULT_EXPERIMENT, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/planning.jsonl"), help="(%(default)s)")
    parser.add_argument("--only", default="", help="names of cases, with commas between")
    parser.add_argument("--requests", type=positive_int, help="in each run, instead of the case's")
    parser.add_argument("--seeds", type=positive_int, help="instead of the experiment's")
    parser.add_argument("--jobs", type=positive_int, default=1, help="processes (%(default)s)")
    return parser.parse_args()


def load(path: Path) -> PlanningExperiment:
    """Read the experiment file."""
    try:
        return TypeAdapter(PlanningExperiment).validate_python(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{path} is not a planning experiment: {error}") from error


def chosen(cases: Sequence[Case], only: str) -> list[Case]:
    """The cases of these names; all of them when none is given."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    missing = set(names) - {case.name for case in cases}
    if missing:
        known = ", ".join(case.name for case in cases)
        raise SettingsError(f"no case {', '.join(sorted(missing))}: there are {known}")
    return [case for case in cases if not names or case.name in names]


# The papers' engine model


def published_table(experiment: PlanningExperiment) -> str:
    """The papers' rows: as they print them, and as their own engine model gives them."""
    head = ["trace", "printed", "GPUs", "saving", "alpha", "w_s", "rho", "by requests", "by work"]
    head.append("alpha implied")
    lines = []
    for row in experiment.published:
        mix = LengthMix.of(choose_trace(TraceChoice(name=row["trace"], requests=20_000), 0))
        lines.append([row["trace"], row["printed"], *recomputed(A100, mix, row), implied(row)])
    rates = {row["rate_per_s"] for row in experiment.published}
    whole = ", ".join(f"{math.ceil(rate / PRINTED_WHOLE_RATE)} for {rate:g}/s" for rate in sorted(rates))
    note = f"{PRINTED_WHOLE_RATE} requests per second of an instance make {whole}, whatever the trace."
    return f"{markdown(head, lines)}\n\n{note}"


def implied(row: Mapping[str, Any]) -> str:
    """The share of short requests that a printed closed form needs; a dash where none is printed."""
    if "closed_form" not in row:
        return "-"
    return f"{row['closed_form'] / (1 - PRINTED_WHOLE_RATE / PRINTED_SHORT_RATE):.2f}"


def recomputed(engine: PaperEngine, mix: LengthMix, row: Mapping[str, Any]) -> list[str]:
    """GPUs of one pool and of two by the papers' model, and its closed forms."""
    rate, ttft_s, border = row["rate_per_s"], row["ttft_s"], row["b_short_tokens"]
    short, long = mix.split(border)
    alpha = len(short) / len(mix)
    whole = engine.pool(mix, row["context_tokens"])
    undivided = whole.instances(rate, ttft_s)
    short_pool = engine.pool(short, border)
    divided = short_pool.instances(alpha * rate, ttft_s)
    if len(long):
        divided += engine.pool(long, row["context_tokens"]).instances((1 - alpha) * rate, ttft_s)
    # The pace of short requests alone, on instances of either kind.
    rho = short_pool.throughput_per_s / engine.pool(short, row["context_tokens"]).throughput_per_s
    iterations = [float(np.mean(np.ceil(m.prompts / engine.chunk_tokens) + m.outputs)) for m in (short, mix)]
    w_s = work_share(alpha, *iterations)
    return [
        f"{undivided * engine.gpus} -> {divided * engine.gpus}",
        f"{1 - divided / undivided:.1%}",
        f"{alpha:.4f}",
        f"{w_s:.3f}",
        f"{rho:.2f}",
        f"{request_share_saving(alpha, rho):.1%}",
        f"{work_share_saving(w_s, rho):.1%}",
    ]


# Plans


def grid_cases(grid: Grid, out: Path) -> Iterator[Case]:
    """One case for each combination, its requests in a file beside the results."""
    for ratio in grid.long_ratios:
        for short in grid.short:
            for long in grid.long:
                # No plus sign: it would name two traces to merge.
                name = f"{short[0]}_{short[1]}-{long[0]}_{long[1]}-{ratio:g}"
                path = out.with_suffix("") / f"{name}.csv"
                write_mix(path, grid, ratio, short, long)
                border = (sum(short) + sum(long)) // 2
                yield Case(
                    name=name,
                    trace=str(path),
                    profile=grid.profile,
                    rate_per_s=grid.rate_per_s,
                    ttft_s=grid.ttft_s,
                    tpot_s=grid.tpot_s,
                    short_profiles=grid.short_profiles,
                    b_short_tokens=(border,),
                    worst_case_slots=grid.worst_case_slots,
                    variants=False,
                    candidates=1,
                    requests=grid.requests,
                )


def write_mix(path: Path, grid: Grid, ratio: float, short: Sequence[int], long: Sequence[int]) -> None:
    """A trace file of that mix; lengths vary by a third around their means."""
    rng = stream(0, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        for number in range(grid.requests):
            prompt, output = long if rng.random() < ratio else short
            rows.writerow(
                (
                    f"{number / grid.rate_per_s:.6f}",
                    max(1, round(prompt * rng.uniform(2 / 3, 4 / 3))),
                    max(1, round(output * rng.uniform(2 / 3, 4 / 3))),
                )
            )


def played(cases: Sequence[Case], experiment: PlanningExperiment, args: argparse.Namespace) -> Iterator[Row]:
    """Each case as JSON, written as soon as it is done."""
    effort = Effort(
        seeds=range(args.seeds or experiment.seeds),
        stand_in_replicas=experiment.stand_in_replicas,
        jobs=args.jobs,
    )
    costs = CostTable.load()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file, progress_bar("plans", len(cases)) as advance:
        circumstances = {"commit": commit(), "hardware": hardware(), "load_average": load_average()}
        for case in cases:
            demand = Workload(
                trace=TraceChoice(
                    name=case.trace, requests=args.requests or case.requests, arrivals="poisson"
                ),
                rate_per_s=case.rate_per_s,
                slo=Slo(ttft_s=case.ttft_s, tpot_s=case.tpot_s),
                output_known=case.output_known,
            )
            plan = make_plan(space(case), demand, costs, effort)
            row = {
                "case": asdict(case),
                "share": plan.verifier.share,
                "requests": plan.demand.trace.requests,
                "dropped": plan.workload.dropped,
                "seeds": list(effort.seeds),
                **plan_as_json(plan.result),
                "provenance": circumstances,
            }
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            advance()
            yield row


def space(case: Case) -> FleetOptions:
    """What the planner may choose from in a case."""
    return FleetOptions(
        profile=case.profile,
        short_profiles=case.short_profiles,
        long_profiles=case.long_profiles,
        b_short_tokens=case.b_short_tokens,
        worst_case_slots=case.worst_case_slots,
        variants=case.variants,
        candidates=case.candidates,
    )


def table(rows: Sequence[Row]) -> str:
    """One line for each case and baseline."""
    head = (
        "case | baseline | GPUs | saving | +- | alpha | w_s | by requests | by work | both pools | P99 TTFT s"
    )
    lines = [
        [row["case"]["name"], name, *comparison(fleets.get(name), fleets.get("pools"))]
        for row in rows
        for fleets in [{one["name"]: one for one in row["fleets"]}]
        for name in ("worst-case-homogeneous", "paged-homogeneous")
    ]
    verdicts = "\n".join(f"{row['case']['name']}: {row['verdict']}" for row in rows)
    return f"{markdown(head.split(' | '), lines)}\n\n{verdicts}"


def comparison(baseline: Row | None, pools: Row | None) -> list[str]:
    """The cells of one line; a dash where there is no fleet."""
    if baseline is None or pools is None:
        there = baseline or pools
        return ["none" if there is None else f"{there['gpus']} (one of the two)", *["-"] * 8]
    against = pools["savings"][baseline["name"]]
    terms = against["closed_form"]
    return [
        f"{baseline['gpus']} -> {pools['gpus']}",
        f"{against['simulated']:.1%}",
        f"{against['resolution']:.1%}",
        f"{terms['alpha']:.3f}",
        f"{terms['w_s']:.3f}",
        f"{terms['by_requests']:.1%}",
        f"{terms['by_work']:.1%}",
        f"{terms['by_both_pools']:.1%}",
        f"{baseline['p99_ttft_s']:.2f} -> {pools['p99_ttft_s']:.2f}",
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
