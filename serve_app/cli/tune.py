"""Command `tune`: searches better settings for a trace in the digital twin."""

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from serve_app.cli.command import (
    Command,
    ProgressCallback,
    add_report_argument,
    arguments_as_json,
    command_line,
    positive_float,
    positive_int,
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
    parse_setting,
    trace_choice,
)
from serve_app.core.metrics.targets import ClassTarget, ClassTargets
from serve_app.errors import SettingsError
from serve_app.lab.provenance import provenance
from serve_app.lab.reports.document import Origin
from serve_app.lab.reports.page import write_report
from serve_app.lab.reports.tables import paragraph
from serve_app.lab.simulation.batch import saturated_rate_per_s
from serve_app.lab.simulation.run import RunSettings, fitted_trace
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.workloads.catalog import notes_on
from serve_app.tuning.digital_twin import TwinPlan, TwinProcesses, TwinSettings
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.optimiser import TpeOptimiser
from serve_app.tuning.report_page import study_page
from serve_app.tuning.search_space import SearchSpace, Tunable, Values, space_of
from serve_app.tuning.study import Budget, Round, StudySettings, run_study
from serve_app.tuning.study_report import StudyReport

_TWIN = TwinSettings()
_STUDY = StudySettings()


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
    add_report_argument(parser)


def _configure_system(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--policy", default="ewsjf", help="policy to tune (default: %(default)s)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="current scheduler setting, such as backpressure.target_waiting=5; may be repeated",
    )
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
        "--trials",
        type=positive_int,
        default=_STUDY.trials,
        help="maximum number of candidates (default: %(default)s)",
    )
    group.add_argument(
        "--seconds", type=positive_float, help="time limit in seconds, including the confirmation"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="seed of windows and proposals (default: %(default)s)"
    )
    group.add_argument(
        "--window",
        type=positive_int,
        default=_TWIN.window_requests,
        help="requests per window (default: %(default)s)",
    )
    group.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (default: one per core)"
    )


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
    given = dict(parse_setting(text, "--set") for text in args.set)
    tunable = Tunable(scheduler=scheduler_settings(args.policy, fleet.routing, given))
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


def anchors_of(args: argparse.Namespace, space: SearchSpace) -> list[Values]:
    """Return candidates to evaluate first, after the incumbent: the default values of the parameters."""
    defaults = Tunable(scheduler=scheduler_settings(args.policy, fleet_of(args).routing, {}))
    return [{each.name: defaults.value(each) for each in space}]


def _objective(args: argparse.Namespace) -> ObjectiveSettings:
    target = ClassTarget(ttft_s=args.slo_ttft_s, long_ttft_s=args.slo_long_ttft_s, tpot_s=args.slo_tpot_s)
    targets = ClassTargets(interactive=target, default=target, short_at_tokens=args.short_at)
    return ObjectiveSettings(kind=args.objective, targets=targets)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_EXAMPLE = """example:
  python -m serve_app tune --trace azure-code+azure-conv --load 0.9 --seconds 180 --json out/tuned.json
"""


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with progress_bar("rate at load 1.0", 1) as advance:
        plan, settings = plan_of(args), StudySettings(trials=args.trials)
        advance()
    for note in notes_on(plan.traffic):
        warn(note)
    optimiser = TpeOptimiser(plan.space, seed=args.seed, anchors=anchors_of(args, plan.space))
    # The trace and load 1.0 used up part of the user's time, but no time of the search.
    left_s = None if args.seconds is None else max(1.0, args.seconds - (time.monotonic() - began))
    what, total = ("candidates", args.trials) if left_s is None else ("seconds", math.ceil(left_s))
    with progress_bar(what, total) as advance, TwinProcesses(plan, jobs=args.jobs) as twin:
        on_round, yield_cpu = _steps(advance, by_time=left_s is not None)
        course = run_study(
            optimiser,
            settings,
            twin,
            Budget(clock=time.monotonic, seconds=left_s, yield_cpu=yield_cpu),
            on_round,
            independent_windows=plan.independent_windows,
        )
    report = StudyReport(plan.space, settings, course)
    print_result(f"{paragraph(_heading(plan))}\n\n{report.as_text()}")
    found = provenance(plan.traffic, arguments_as_json(args), [args.seed])
    if args.json is not None:
        write_json(args.json, report.as_json() | {"provenance": found})
    if args.report is not None:
        write_report(args.report, study_page(report, plan, Origin(found, command_line(args))))
    return 0


def _steps(
    advance: ProgressCallback, *, by_time: bool
) -> tuple[Callable[[Round], object], Callable[[], object]]:
    """Return the callbacks after a round and a window that move the bar: by candidates, or by seconds."""
    began, shown = time.monotonic(), 0

    def to(place: int) -> None:
        nonlocal shown
        advance(place - shown)
        shown = place

    if by_time:
        return (lambda _: None), (lambda: to(int(time.monotonic() - began)))
    return (lambda one: to(one.trials)), (lambda: None)


def _heading(plan: TwinPlan) -> str:
    trace = plan.traffic
    rate = "at once" if trace.rate_per_s is None else f"at {trace.rate_per_s:.2f} requests/s"
    return (
        f"{trace.title}: {len(trace.requests):,} requests {rate}, windows of "
        f"{plan.settings.window_requests:,}; {len(plan.engines)} engines; objective {plan.objective.kind}"
    )


COMMAND = Command(example=_EXAMPLE, configure=configure, run=_run)
