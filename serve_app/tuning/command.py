"""`python -m serve_app tune`: better settings for a trace, found in the digital twin, if there are any."""

import argparse
import math
import time

from serve_app.command import Command, given_arguments, progress_bar, say, write_json
from serve_app.provenance import provenance
from serve_app.tuning import arguments
from serve_app.tuning.search.optimiser import make_optimiser
from serve_app.tuning.search.recommendation import as_json, report
from serve_app.tuning.search.study import Study
from serve_app.tuning.search.study_run import Budget, run_study
from serve_app.tuning.twin.digital_twin import TwinPlan
from serve_app.tuning.twin.processes import TwinProcesses

_EXAMPLE = """example:
  python -m serve_app tune --trace azure-code+azure-conv --load 0.9 --seconds 60 --json out/tuned.json
"""


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    plan, settings = arguments.plan_of(args), arguments.study_of(args)
    optimiser = make_optimiser(
        args.search, plan.space, seed=args.seed, anchors=arguments.anchors_of(args, plan.space)
    )
    study = Study(optimiser, settings, independent_windows=plan.independent_windows)
    # What it took to read the trace and to find load 1.0 is no part of the search, but of the user's time.
    left_s = None if args.seconds is None else max(1.0, args.seconds - (time.monotonic() - began))
    budget = Budget(clock=time.monotonic, seconds=left_s)
    rounds = math.ceil((args.trials - 1) / settings.batch)
    with progress_bar("rounds", rounds) as advance, TwinProcesses(plan, jobs=args.jobs) as twin:
        course = run_study(study, settings, twin, budget, lambda _: advance())
    finding = study.finding
    assert finding is not None
    say(f"{_heading(plan)}\n\n{report(plan, settings, finding, course)}")
    if args.json is not None:
        document = as_json(plan, settings, finding, course)
        found = provenance(plan.traffic, given_arguments(args), [args.seed])
        write_json(args.json, document | {"provenance": found})
    return 0


def _heading(plan: TwinPlan) -> str:
    trace = plan.traffic
    rate = "at once" if trace.rate_per_s is None else f"at {trace.rate_per_s:.2f} requests/s"
    return (
        f"{trace.name}: {len(trace.requests):,} requests {rate}, windows of "
        f"{plan.settings.window_requests:,}; {len(plan.engines)} engines; objective {plan.objective.kind}"
    )


COMMAND = Command(
    name="tune",
    summary="search better scheduler settings for a trace in the digital twin",
    example=_EXAMPLE,
    configure=arguments.configure,
    run=_run,
)
