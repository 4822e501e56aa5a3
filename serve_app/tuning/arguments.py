"""The arguments of `python -m serve_app tune`, and the twin that they make."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from serve_app.command import positive_float, positive_int
from serve_app.errors import SettingsError
from serve_app.metrics.summary import SHORT_AT_TOKENS
from serve_app.simulation.arguments import pools, setting
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.load import saturated_rate_per_s
from serve_app.simulation.run import RunSettings, fitted_trace
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import TraceChoice
from serve_app.tuning.digital_twin import TwinPlan, TwinSettings, with_speed
from serve_app.tuning.objective import ObjectiveSettings
from serve_app.tuning.optimiser import METHODS
from serve_app.tuning.search_space import SearchSpace, Values
from serve_app.tuning.service_class import ClassTarget, Targets
from serve_app.tuning.study_settings import StudySettings
from serve_app.tuning.tunable import Tunable, parameters_of, space_of, started_from

_TWIN = TwinSettings()
_STUDY = StudySettings()
_TARGET = ClassTarget()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add every argument."""
    _configure_workload(parser.add_argument_group("workload"))
    _configure_system(parser.add_argument_group("scheduler and fleet"))
    _configure_objective(parser.add_argument_group("objective"))
    _configure_search(parser.add_argument_group("search"))
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found, with provenance")


def _configure_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--trace",
        required=True,
        help="azure-code, azure-conv, lmsys, paper-mix, or a trace file; several joined by + are merged",
    )
    rate = group.add_mutually_exclusive_group()
    rate.add_argument("--load", type=positive_float, help="share of the rate that saturates the fleet: 0.9")
    rate.add_argument("--rate", type=positive_float, help="requests per second (the trace's own)")
    group.add_argument(
        "--requests", type=positive_int, default=5_000, help="to draw windows from (%(default)s)"
    )
    group.add_argument("--tenants", help="8, 8:1.2 (Zipf exponent) or search=3,chat=1 (weights)")
    group.add_argument("--priorities", help="shares of priority classes: interactive=1,batch=3")
    group.add_argument("--arrivals", help="poisson, gamma:CV or on-off:ON,OFF in requests (the trace's own)")
    group.add_argument("--traces-folder", type=Path, help="where trace files lie (EWSJF_TRACES)")


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
    group.add_argument("--profile", default="llama2-70b-h100-tp4", help="name or YAML file (%(default)s)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--replicas", type=positive_int, default=4, help="in one pool (%(default)s)")
    size.add_argument("--pools", type=pools, metavar="short:N,long:M", help="replicas of two pools")
    group.add_argument(
        "--b-short", type=positive_int, default=8_192, help="with two pools: the context of the short one"
    )
    group.add_argument(
        "--speed-factor",
        type=positive_float,
        default=1.0,
        help="engines take so many times as long as their profile says (%(default)s)",
    )


def _configure_objective(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--objective", choices=("slo", "paper"), default="slo", help="(%(default)s)")
    group.add_argument(
        "--short-at", type=positive_int, default=SHORT_AT_TOKENS, help="longest short prompt (%(default)s)"
    )
    group.add_argument(
        "--slo-ttft-s", type=positive_float, default=_TARGET.ttft_s, help="of short prompts (%(default)s)"
    )
    group.add_argument(
        "--slo-long-ttft-s", type=positive_float, default=_TARGET.long_ttft_s, help="of others (%(default)s)"
    )
    group.add_argument("--slo-tpot-s", type=positive_float, default=_TARGET.tpot_s, help="(%(default)s)")


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
    """The twin that is asked for.

    Raises:
        ServeAppError: no twin can be made of these arguments.
        ValueError: an argument is out of range.
    """
    if args.seed < 0:
        raise SettingsError(f"--seed must not be negative, got {args.seed}")
    fleet = _fleet(args)
    tunable = Tunable(scheduler=scheduler_settings(args.policy, fleet.routing, _settings(args.set, "--set")))
    parameters = parameters_of(tunable.scheduler, args.b_short)
    tunable = started_from(tunable, parameters, _settings(args.start, "--start"))
    run = RunSettings(
        policy=args.policy, fleet=fleet, trace=_trace(args), seed=args.seed, rate_per_s=args.rate
    )
    if args.load is not None:
        run = replace(run, rate_per_s=args.load * saturated_rate_per_s(fleet, run.trace, args.seed))
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable, context_of_short=args.b_short, only=_names(args.only)),
        engines=with_speed(fleet.plans(isolated=run.isolates), args.speed_factor),
        traffic=fitted_trace(run).trace,
        objective=_objective(args),
        settings=TwinSettings(seed=args.seed, window_requests=args.window),
    )


def anchors_of(args: argparse.Namespace, space: SearchSpace) -> list[Values]:
    """What is tried first besides what is in force: the product's defaults, as far as they are tuned."""
    if args.no_defaults:
        return []
    defaults = Tunable(scheduler=scheduler_settings(args.policy, _fleet(args).routing, {}))
    return [{each.name: defaults.value(each) for each in space}]


def study_of(args: argparse.Namespace) -> StudySettings:
    """How long is searched."""
    return StudySettings(trials=args.trials)


def _fleet(args: argparse.Namespace) -> FleetSettings:
    return FleetSettings(
        profile=args.profile, replicas=args.pools or {ONE_POOL: args.replicas}, b_short_tokens=args.b_short
    )


def _settings(texts: list[str], option: str) -> dict[str, object]:
    return dict(setting(text, option) for text in texts)


def _trace(args: argparse.Namespace) -> TraceChoice:
    return TraceChoice(
        name=args.trace,
        requests=args.requests,
        tenants=args.tenants,
        priorities=args.priorities,
        folder=args.traces_folder,
        arrivals=args.arrivals,
    )


def _objective(args: argparse.Namespace) -> ObjectiveSettings:
    target = ClassTarget(ttft_s=args.slo_ttft_s, long_ttft_s=args.slo_long_ttft_s, tpot_s=args.slo_tpot_s)
    targets = Targets(interactive=target, default=target, short_at_tokens=args.short_at)
    return ObjectiveSettings(kind=args.objective, targets=targets)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
