"""The command `python -m serve_app tune`: search better settings for a trace in the digital twin."""

import argparse
import math
import time
from collections.abc import Callable

from serve_app.command import (
    Advance,
    Command,
    command_line,
    given_arguments,
    progress_bar,
    say,
    warn,
    write_json,
)
from serve_app.provenance import provenance
from serve_app.reports.document import Origin
from serve_app.reports.page import write_report
from serve_app.tables import paragraph
from serve_app.tuning import arguments
from serve_app.tuning.report_page import study_page
from serve_app.tuning.search.optimiser import make_optimiser
from serve_app.tuning.search.study import Study
from serve_app.tuning.search.study_report import StudyReport
from serve_app.tuning.search.study_run import Budget, Round, run_study
from serve_app.tuning.twin.digital_twin import TwinPlan
from serve_app.tuning.twin.processes import TwinProcesses
from serve_app.workloads.catalog import notes_on

_EXAMPLE = """example:
  python -m serve_app tune --trace azure-code+azure-conv --load 0.9 --seconds 180 --json out/tuned.json
"""


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with progress_bar("rate at load 1.0", 1) as advance:
        plan, settings = arguments.plan_of(args), arguments.study_of(args)
        advance()
    for note in notes_on(plan.traffic):
        warn(note)
    optimiser = make_optimiser(
        args.search, plan.space, seed=args.seed, anchors=arguments.anchors_of(args, plan.space)
    )
    study = Study(optimiser, settings, independent_windows=plan.independent_windows)
    # Reading the trace and finding load 1.0 took part of the user's time, but none of the search's.
    left_s = None if args.seconds is None else max(1.0, args.seconds - (time.monotonic() - began))
    what, total = ("candidates", args.trials) if left_s is None else ("seconds", math.ceil(left_s))
    with progress_bar(what, total) as advance, TwinProcesses(plan, jobs=args.jobs) as twin:
        if left_s is None:
            course = run_study(study, settings, twin, Budget(clock=time.monotonic), _counted(advance))
        else:
            budget = Budget(clock=time.monotonic, seconds=left_s, rest=_clocked(advance))
            course = run_study(study, settings, twin, budget)
    assert study.finding is not None
    report = StudyReport(plan.space, settings, study.finding, course)
    say(f"{paragraph(_heading(plan))}\n\n{report.as_text()}")
    found = provenance(plan.traffic, given_arguments(args), [args.seed])
    if args.json is not None:
        write_json(args.json, report.as_json() | {"provenance": found})
    if args.report is not None:
        write_report(args.report, study_page(report, plan, Origin(found, command_line(args))))
    return 0


def _counted(advance: Advance) -> Callable[[Round], object]:
    """Moves the progress bar by the candidates that each round adds; a round is not one of a known number."""
    shown = 0

    def on_round(one: Round) -> None:
        nonlocal shown
        advance(one.trials - shown)
        shown = one.trials

    return on_round


def _clocked(advance: Advance) -> Callable[[], object]:
    """Moves the progress bar by whole seconds, where a budget of time says when the search ends."""
    began, shown = time.monotonic(), 0

    def on_window() -> None:
        nonlocal shown
        passed = int(time.monotonic() - began)
        advance(passed - shown)
        shown = passed

    return on_window


def _heading(plan: TwinPlan) -> str:
    trace = plan.traffic
    rate = "at once" if trace.rate_per_s is None else f"at {trace.rate_per_s:.2f} requests/s"
    return (
        f"{trace.title}: {len(trace.requests):,} requests {rate}, windows of "
        f"{plan.settings.window_requests:,}; {len(plan.engines)} engines; objective {plan.objective.kind}"
    )


COMMAND = Command(
    name="tune",
    summary="search better scheduler settings for a trace in the digital twin",
    example=_EXAMPLE,
    configure=arguments.configure,
    run=_run,
)
