"""Do two pools save GPUs, and do the closed forms say so truthfully?

Three parts. `cases` runs the planner on published traces: the production scheduler in the simulator, physical
engine profiles, and both baselines. `grid` does the same on synthetic mixes of short and long requests.
`published` simulates nothing: it computes the papers' tables again with the papers' own engine model.
"""

import csv
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated, trace_sources
from experiments.common.rows import Key
from experiments.planning.published import recomputed
from experiments.planning.settings import Mix, MixGrid, PlanCase, PlanningExperiment
from serve_app.command import progress_bar
from serve_app.planning.plan import Effort, make_plan
from serve_app.planning.results import plan_as_json
from serve_app.planning.sizing.costs import CostTable
from serve_app.workloads.streams import stream

# Lengths of the grid vary by a third around their means.
_LEAST, _MOST = 2 / 3, 4 / 3


def play(experiment: PlanningExperiment, context: Context) -> Iterator[Measurement]:
    """The papers' rows, which take no time, then the plans."""
    yield from _published(experiment)
    effort = Effort(
        seeds=range(experiment.seeds), stand_in_replicas=experiment.stand_in_replicas, jobs=context.jobs
    )
    mixes = list(experiment.grid.mixes())
    with progress_bar("plans", len(experiment.cases) + len(mixes)) as advance:
        for case in experiment.cases:
            if not context.has({"case": case.name}):
                yield Measurement(
                    key={"case": case.name},
                    seeds=effort.seeds,
                    traces=trace_sources(case.trace),
                    figures=_planned(case, case.trace, effort),
                    settings=_settings(case, effort),
                )
            advance()
        for mix in mixes:
            if not context.has({"mix": mix.name}):
                yield _of_grid(experiment.grid, mix, effort)
            advance()


def _published(experiment: PlanningExperiment) -> Iterator[Measurement]:
    for row in experiment.published:
        key: Key = {"published": row.trace, "b_short": row.b_short_tokens}
        yield Measurement(
            key=key,
            traces=trace_sources(row.trace),
            figures=recomputed(row, experiment.published_requests),
            settings=asdict(row) | {"requests": experiment.published_requests},
        )


def _of_grid(grid: MixGrid, mix: Mix, effort: Effort) -> Measurement:
    case = grid.case(mix)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mix.csv"
        write_mix(path, mix, case)
        figures = _planned(case, str(path), effort)
    return Measurement(
        key={"mix": mix.name},
        seeds=effort.seeds,
        traces=generated("mixes of two kinds"),
        figures=figures,
        settings=_settings(case, effort) | {"mix": asdict(mix)},
    )


def write_mix(path: Path, mix: Mix, case: PlanCase) -> None:
    """A trace file with as many requests of that mix as a run plays."""
    rng = stream(0, mix.name)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        for number in range(case.requests):
            lengths = mix.long if rng.random() < mix.long_ratio else mix.short
            drawn = (max(1, round(tokens * rng.uniform(_LEAST, _MOST))) for tokens in lengths)
            rows.writerow((f"{number / case.rate_per_s:.6f}", *drawn))


def _planned(case: PlanCase, trace: str, effort: Effort) -> dict[str, Any]:
    """The fleets that were chosen, and the closed forms beside what was simulated."""
    plan = make_plan(case.options(), case.demand(trace), CostTable.load(), effort)
    found = plan_as_json(plan.result)
    return {
        "fleets": {fleet.pop("name"): fleet for fleet in found["fleets"]},
        "verdict": found["verdict"],
        "share": plan.verifier.share,
        "requests": plan.demand.trace.requests,
        "dropped": plan.workload.dropped,
        "runs": plan.verifier.played,
    }


def _settings(case: PlanCase, effort: Effort) -> dict[str, Any]:
    return {**asdict(case), "stand_in_replicas": effort.stand_in_replicas}


EXPERIMENT = Experiment(settings=PlanningExperiment, play=play)
