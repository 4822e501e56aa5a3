"""The arguments of `python -m serve_app tune`, and the twin plan that they describe."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from serve_app.command import add_report_argument, positive_float, positive_int
from serve_app.errors import SettingsError
from serve_app.metrics.targets import ClassTarget, ClassTargets
from serve_app.simulation.arguments import (
    configure_replicas,
    configure_slo,
    configure_workload,
    fleet_of,
    setting,
    trace_choice,
)
from serve_app.simulation.batch import saturated_rate_per_s
from serve_app.simulation.run import RunSettings, fitted_trace
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.search.optimiser import METHODS
from serve_app.tuning.search.search_space import SearchSpace, Values
from serve_app.tuning.search.study import StudySettings
from serve_app.tuning.search.tunable import Tunable, parameters_of, space_of, started_from
from serve_app.tuning.twin.digital_twin import TwinPlan, TwinSettings, with_speed

_TWIN = TwinSettings()
_STUDY = StudySettings()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add every argument."""
    configure_workload(
        parser.add_argument_group("workload"),
        requests=5_000,
        requests_help="to draw windows from (%(default)s)",
    )
    _configure_system(parser.add_argument_group("scheduler and fleet"))
    _configure_objective(parser.add_argument_group("objective"))
    _configure_search(parser.add_argument_group("search"))
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found, with provenance")
    add_report_argument(parser)


def _configure_system(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--policy", default="ewsjf", help="whose parameters are tuned (%(default)s)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="a scheduler setting in force, such as backpressure.target_waiting=5; may be repeated",
    )
    group.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a tuned parameter in force, by its short name or path, such as b_u=5; may be repeated",
    )
    group.add_argument("--only", default="", metavar="NAME[,NAME...]", help="tune only these parameters")
    configure_replicas(group, b_short_help="with several pools: the context of the first (8192)")
    group.add_argument(
        "--speed-factor",
        type=positive_float,
        default=1.0,
        help="step times of the engines over those of their profile (%(default)s)",
    )


def _configure_objective(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--objective", choices=("slo", "paper"), default="slo", help="(%(default)s)")
    configure_slo(group)


def _configure_search(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--search", choices=METHODS, default="tpe", help="(%(default)s)")
    group.add_argument(
        "--trials", type=positive_int, default=_STUDY.trials, help="candidates at most (%(default)s)"
    )
    group.add_argument("--seconds", type=positive_float, help="time at most, confirmation included")
    group.add_argument("--seed", type=int, default=0, help="of windows and proposals (%(default)s)")
    group.add_argument(
        "--window", type=positive_int, default=_TWIN.window_requests, help="requests in one (%(default)s)"
    )
    group.add_argument(
        "--no-defaults",
        action="store_true",
        help="do not try the product's defaults first when --start or --set differs from them",
    )
    group.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (one for each core)"
    )


def plan_of(args: argparse.Namespace) -> TwinPlan:
    """The plan of the twin in which the search takes place.

    Raises:
        ServeAppError: no twin can be made of these arguments.
        ValueError: an argument is out of range.
    """
    if args.seed < 0:
        raise SettingsError(f"--seed must not be negative, got {args.seed}")
    fleet = fleet_of(args)
    max_b_short = max(fleet.b_short_tokens, fleet.plans()[0].engine.max_model_len)
    tunable = Tunable(scheduler=scheduler_settings(args.policy, fleet.routing, _settings(args.set, "--set")))
    parameters = parameters_of(tunable.scheduler, max_b_short)
    tunable = started_from(tunable, parameters, _settings(args.start, "--start"))
    run = RunSettings(
        policy=args.policy, fleet=fleet, trace=trace_choice(args), seed=args.seed, rate_per_s=args.rate
    )
    if args.load is not None:
        run = replace(run, rate_per_s=args.load * saturated_rate_per_s(fleet, run.trace, args.seed))
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable, max_b_short_tokens=max_b_short, only=_names(args.only)),
        engines=with_speed(fleet.plans(isolated=run.isolates), args.speed_factor),
        traffic=fitted_trace(run).trace,
        objective=_objective(args),
        settings=TwinSettings(seed=args.seed, window_requests=args.window),
    )


def anchors_of(args: argparse.Namespace, space: SearchSpace) -> list[Values]:
    """Candidates to try first, after the values in force: the product's defaults of the tuned parameters."""
    if args.no_defaults:
        return []
    defaults = Tunable(scheduler=scheduler_settings(args.policy, fleet_of(args).routing, {}))
    return [{each.name: defaults.value(each) for each in space}]


def study_of(args: argparse.Namespace) -> StudySettings:
    """The settings of the study."""
    return StudySettings(trials=args.trials)


def _settings(texts: list[str], option: str) -> dict[str, object]:
    return dict(setting(text, option) for text in texts)


def _objective(args: argparse.Namespace) -> ObjectiveSettings:
    target = ClassTarget(ttft_s=args.slo_ttft_s, long_ttft_s=args.slo_long_ttft_s, tpot_s=args.slo_tpot_s)
    targets = ClassTargets(interactive=target, default=target, short_at_tokens=args.short_at)
    return ObjectiveSettings(kind=args.objective, targets=targets)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
