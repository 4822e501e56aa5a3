"""Plans: the smallest fleets of one pool and of two, and the closed forms beside them.

`cases` runs the planner on published traces: the production scheduler in the simulator, physical engine
profiles, and both baselines. `grid` does the same on synthetic mixes of short and long requests.
"""

import csv
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated, trace_sources
from experiments.planning.closed_forms import ClosedForm, closed_form
from serve_app.cli.command import progress_bar
from serve_app.core.metrics.summary import Slo
from serve_app.core.settings_base import settings
from serve_app.lab.planning.plan import Effort, FleetOptions, Plan, make_plan, plan_as_json
from serve_app.lab.planning.queueing import POOLS, CostTable, LengthMix
from serve_app.lab.planning.verification import Workload
from serve_app.lab.workloads import TraceChoice, stream


@settings
class PlanCase(FleetOptions):
    """One plan: the planner's choices and the demand, with fields as the arguments of `ewsjf plan`.

    Attributes:
        name: of its row.
        title: of its line in the table.
        requests: in each run.
        stand_in_replicas: larger undivided fleets are simulated at a share of their size and rate.
    """

    name: str
    title: str
    trace: str
    rate_per_s: float
    requests: int
    ttft_s: float = 2.0
    tpot_s: float = 0.08
    candidates: int = 2
    stand_in_replicas: int = 8

    def demand(self, trace: str) -> Workload:
        """Return the demand on the fleets.

        Args:
            trace: name or path of the trace; a mix of the grid is in a file.
        """
        return Workload(
            trace=TraceChoice(name=trace, requests=self.requests, arrivals="poisson"),
            rate_per_s=self.rate_per_s,
            slo=Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Short and long requests.

    Attributes:
        short, long: mean prompt and output tokens; lengths vary by a third around them.
        long_ratio: share of the requests that are long.
    """

    short: tuple[int, int]
    long: tuple[int, int]
    long_ratio: float

    @property
    def name(self) -> str:
        """Return the name in the table."""
        (short, answer), (long, long_answer) = self.short, self.long
        return f"{short:,} + {answer:,} and {long:,} + {long_answer:,}, {self.long_ratio:.0%} long"

    @property
    def b_short_tokens(self) -> int:
        """Return the midpoint between the kinds."""
        return (sum(self.short) + sum(self.long)) // 2


@settings
class MixGrid:
    """Every combination of these, planned like a case."""

    profile: str
    rate_per_s: float
    requests: int
    long_ratios: tuple[float, ...]
    short: tuple[tuple[int, int], ...]
    long: tuple[tuple[int, int], ...]
    ttft_s: float = 2.0
    tpot_s: float = 0.08
    worst_case_slots: int | None = None

    def mixes(self) -> Iterator[Mix]:
        """Yield all mixes."""
        for ratio in self.long_ratios:
            for short in self.short:
                for long in self.long:
                    yield Mix(short=short, long=long, long_ratio=ratio)

    def case(self, mix: Mix) -> PlanCase:
        """Return the plan of one mix."""
        return PlanCase(
            name=mix.name,
            title=mix.name,
            trace=mix.name,
            profile=self.profile,
            rate_per_s=self.rate_per_s,
            requests=self.requests,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            b_short_tokens=(mix.b_short_tokens,),
            worst_case_slots=self.worst_case_slots,
            variants=False,
            candidates=1,
        )


@settings
class PlansSettings:
    """Settings of the part."""

    cases: tuple[PlanCase, ...]
    grid: MixGrid
    seeds: int


# Lengths of the grid vary by a third around their means.
_LEAST, _MOST = 2 / 3, 4 / 3


def play(experiment: PlansSettings, context: Context) -> Iterator[Measurement]:
    """Plan the cases, then the grid."""
    seeds = range(experiment.seeds)
    mixes = list(experiment.grid.mixes())
    with progress_bar("plans", len(experiment.cases) + len(mixes)) as advance:
        for case in experiment.cases:
            if not context.has({"case": case.name}):
                yield Measurement(
                    key={"case": case.name},
                    seeds=seeds,
                    traces=trace_sources(case.trace),
                    figures=_planned(case, case.trace, seeds, context.jobs),
                    settings=asdict(case),
                )
            advance()
        for mix in mixes:
            if not context.has({"mix": mix.name}):
                yield _of_grid(experiment.grid, mix, seeds, context.jobs)
            advance()


def _of_grid(grid: MixGrid, mix: Mix, seeds: Sequence[int], jobs: int) -> Measurement:
    case = grid.case(mix)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mix.csv"
        write_mix(path, mix, case)
        figures = _planned(case, str(path), seeds, jobs)
    return Measurement(
        key={"mix": mix.name},
        seeds=seeds,
        traces=generated("mixes of two kinds"),
        figures=figures,
        settings=asdict(case) | {"mix": asdict(mix)},
    )


def write_mix(path: Path, mix: Mix, case: PlanCase) -> None:
    """Write a trace file with a run's number of requests of this mix."""
    rng = stream(0, mix.name)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        for number in range(case.requests):
            lengths = mix.long if rng.random() < mix.long_ratio else mix.short
            drawn = (max(1, round(tokens * rng.uniform(_LEAST, _MOST))) for tokens in lengths)
            rows.writerow((f"{number / case.rate_per_s:.6f}", *drawn))


def _planned(case: PlanCase, trace: str, seeds: Sequence[int], jobs: int) -> dict[str, Any]:
    """Return the chosen fleets, and the closed forms beside the simulated results."""
    effort = Effort(seeds=seeds, max_simulated_replicas=case.stand_in_replicas, jobs=jobs)
    plan = make_plan(case, case.demand(trace), CostTable.load(), effort)
    found = plan_as_json(plan.result)
    fleets = {fleet.pop("name"): fleet for fleet in found["fleets"]}
    for name, form in closed_forms(plan).items():
        fleets[POOLS]["savings"][name]["closed_form"] = form.as_json()
    return {
        "fleets": fleets,
        "verdict": found["verdict"],
        "share": plan.verifier.share,
        "requests": plan.demand.trace.requests,
        "dropped": plan.workload.dropped,
        "runs": plan.verifier.played,
        "meets_at_double_scale": {name: one.meets for name, one in plan.double_scale.items()},
    }


def closed_forms(plan: Plan) -> dict[str, ClosedForm]:
    """Return the closed forms of the chosen pools against each baseline, by its name."""
    mix, pools = LengthMix.of(plan.workload.trace, output_known=plan.demand.output_known), plan.result.pools
    return {
        one.plan.name: closed_form(one.plan, pools.plan, mix, plan.demand.slo, CostTable.load())
        for one in (plan.result.worst_case, plan.result.paged)
        if one is not None and pools is not None
    }


EXPERIMENT = Experiment(settings=PlansSettings, play=play)
