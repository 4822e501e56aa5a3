"""Command `tune`: searches better settings for a trace in the digital twin."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

from serve_app.cli.command import (
    Command,
    add_jobs,
    add_number,
    add_settings,
    add_whole,
    arguments_as_json,
    print_result,
    progress_bar,
    warn,
    write_json,
)
from serve_app.cli.workload_arguments import (
    configure_replicas,
    configure_slo,
    configure_workload,
    fleet_of,
    settings_of,
    trace_choice,
)
from serve_app.core.metrics.targets import ClassTarget, ClassTargets
from serve_app.errors import SettingsError
from serve_app.lab.provenance import provenance
from serve_app.lab.simulation.batch import saturated_rate_per_s
from serve_app.lab.simulation.run import RunSettings, fitted_trace
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.tables import paragraph
from serve_app.lab.workloads.catalog import notes_on
from serve_app.tuning.digital_twin import TwinPlan, TwinProcesses, TwinSettings
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.search import SearchKind, search_twin
from serve_app.tuning.search_space import Tunable, space_of
from serve_app.tuning.study import Budget, StudySettings
from serve_app.tuning.study_report import StudyReport

_TWIN = TwinSettings()
_STUDY = StudySettings()
# Estimated windows of a search, for the progress bar.
_PRESET_WINDOWS = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Add all arguments."""
    configure_workload(
        parser.add_argument_group("workload"),
        requests=5_000,
        requests_help="number of requests to sample windows from (default: %(default)s)",
    )
    _configure_system(parser.add_argument_group("scheduler and fleet"))
    _configure_objective(parser.add_argument_group("objective"))
    _configure_search(parser.add_argument_group("search"))
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result with provenance")


def _configure_system(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--policy", default="ewsjf", help="policy to tune (default: %(default)s)")
    add_settings(group, "current scheduler setting")
    group.add_argument("--only", default="", metavar="NAME[,NAME...]", help="tune only these parameters")
    configure_replicas(group, b_short_help="with several pools: context of the first (default: 8192)")


def _configure_objective(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--objective",
        choices=("slo", "paper"),
        default="slo",
        help="objective to maximise (default: %(default)s)",
    )
    configure_slo(group)


def _configure_search(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--search",
        choices=get_args(SearchKind),
        default="presets",
        help="candidates: presets, or presets and then those of a Bayesian search (default: %(default)s)",
    )
    add_whole(
        group, "--proposals", "with tpe: maximum number of candidates after the presets", _STUDY.proposals
    )
    add_number(group, "--seconds", "time limit in seconds, including the confirmation")
    group.add_argument(
        "--seed", type=int, default=0, help="seed of windows and proposals (default: %(default)s)"
    )
    add_whole(group, "--window", "requests per window", _TWIN.window_requests)
    add_jobs(group)


def plan_of(args: argparse.Namespace) -> TwinPlan:
    """Return the plan of the twin in which the search runs.

    Raises:
        ServeAppError: the arguments do not describe a valid twin.
        ValueError: an argument is out of range.
    """
    if args.seed < 0:
        raise SettingsError(f"--seed must not be negative, got {args.seed}")
    fleet = fleet_of(args)
    max_b_short = max(fleet.b_short_tokens, fleet.plans()[0].engine.max_model_len)
    tunable = Tunable(scheduler=scheduler_settings(args.policy, fleet.routing, settings_of(args)))
    run = RunSettings(
        policy=args.policy, fleet=fleet, trace=trace_choice(args), seed=args.seed, rate_per_s=args.rate
    )
    if args.load is not None:
        run = replace(run, rate_per_s=args.load * saturated_rate_per_s(fleet, run.trace, args.seed))
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable, max_b_short_tokens=max_b_short, only=_names(args.only)),
        engines=tuple(fleet.plans(isolated=run.isolates)),
        traffic=fitted_trace(run).trace,
        objective=_objective(args),
        settings=TwinSettings(seed=args.seed, window_requests=args.window),
    )


def _objective(args: argparse.Namespace) -> ObjectiveSettings:
    target = ClassTarget(ttft_s=args.slo_ttft_s, long_ttft_s=args.slo_long_ttft_s, tpot_s=args.slo_tpot_s)
    targets = ClassTargets(interactive=target, default=target, short_at_tokens=args.short_at)
    return ObjectiveSettings(kind=args.objective, targets=targets)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_EXAMPLE = """example:
  ewsjf tune --trace azure-code+azure-conv --load 0.9 --seconds 180 --json out/tuned.json
"""


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with progress_bar("rate at load 1.0", 1) as advance:
        plan, settings = plan_of(args), StudySettings(proposals=args.proposals)
        advance()
    for note in notes_on(plan.traffic):
        warn(note)
    # The trace and load 1.0 used up part of the user's time, but no time of the search.
    left_s = None if args.seconds is None else max(1.0, args.seconds - (time.monotonic() - began))
    windows = _PRESET_WINDOWS + (2 * args.proposals if args.search == "tpe" else 0)
    with progress_bar("windows", windows) as advance, TwinProcesses(plan, jobs=args.jobs) as twin:
        budget = Budget(clock=time.monotonic, seconds=left_s, yield_cpu=advance)
        course = search_twin(plan, settings, twin, budget, args.search)
    report = StudyReport(plan.space, settings, course)
    print_result(f"{paragraph(_heading(plan))}\n\n{report.as_text()}")
    if args.json is not None:
        found = provenance(plan.traffic.provenance(), arguments_as_json(args), [args.seed])
        write_json(args.json, report.as_json() | {"provenance": found})
    return 0


def _heading(plan: TwinPlan) -> str:
    trace = plan.traffic
    return (
        f"{trace.title}: {len(trace.requests):,} requests {trace.pace}, windows of "
        f"{plan.settings.window_requests:,}; {len(plan.engines)} engines; objective {plan.objective.kind}"
    )


COMMAND = Command(example=_EXAMPLE, configure=configure, run=_run)
