"""The arguments of `python -m serve_app simulate`, and the settings that they make."""

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path

import yaml

from serve_app.command import add_report_argument, positive_float, positive_int
from serve_app.engine_model.waiting import SchedulingPolicy
from serve_app.simulation.command.workload_arguments import (
    configure_max_output,
    configure_replicas,
    configure_slo,
    configure_workload,
    fleet_of,
    trace_choice,
)
from serve_app.simulation.direct import Balance
from serve_app.simulation.disturbances.estimate_noise import LengthNoise
from serve_app.simulation.fleet import EngineChanges, FleetSettings
from serve_app.simulation.fleet_file import fleet_of_file
from serve_app.simulation.partitions import LEARNED, PRIOR, PartitionSource, partition_source
from serve_app.simulation.run import RunSettings, SloByLength, policy_names
from serve_app.simulation.simulation import SimulationSettings
from serve_app.simulation.workload import Disclosure

_DEFAULT_POLICY = "ewsjf"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add every argument."""
    _configure_workload(parser.add_argument_group("workload"))
    _configure_scheduler(parser.add_argument_group("scheduler"))
    _configure_fleet(parser.add_argument_group("fleet"))
    _configure_results(parser.add_argument_group("results"))


def _configure_workload(group: "argparse._ArgumentGroup") -> None:
    configure_workload(group, requests_help="how many (a thousand, or all of a file)")
    group.add_argument("--seeds", type=positive_int, default=1, help="runs of each policy (%(default)s)")
    group.add_argument("--first-seed", type=int, default=0, help="the seeds count from here (%(default)s)")
    group.add_argument("--flip-mix", action="store_true", help="exchange short and long shares half-way")


def _configure_scheduler(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--policy",
        default=_DEFAULT_POLICY,
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(policy_names())} (%(default)s); direct is no gateway at all",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="a scheduler setting, such as backpressure.target_waiting=5; may be repeated",
    )
    group.add_argument(
        "--partition",
        default=LEARNED,
        metavar=f"{LEARNED}|{PRIOR}|FILE",
        help=f"length queues of the policies that learn them: {LEARNED} in the run, {PRIOR} (an octave "
        "each), or a YAML list of {min, max, mean, count} (%(default)s)",
    )
    configure_max_output(group)
    group.add_argument(
        "--length-noise",
        type=_share,
        default=0.0,
        metavar="ERROR",
        help="relative error of the prompt lengths that the scheduler sees: 0.3 (exact)",
    )
    group.add_argument("--queue-timeout-s", type=positive_float, default=math.inf, help="(%(default)s)")
    group.add_argument(
        "--report-interval", type=positive_float, default=0.2, metavar="S", help="(%(default)s)"
    )
    group.add_argument("--control-latency", type=_share, default=0.001, metavar="S", help="(%(default)s)")


def _configure_fleet(group: "argparse._ArgumentGroup") -> None:
    configure_replicas(
        group,
        b_short_help="with several pools: the budget that is at home in the first, and its context unless "
        "--pools has one (8192, or that context)",
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the pools of a configuration, in place of --replicas, --pools and --b-short; --profile is "
        "then that of engines of vLLM",
    )
    group.add_argument("--balance", type=Balance, choices=list(Balance), default=Balance.LEAST_OUTSTANDING)
    for name in (
        "long-prefill-token-threshold",
        "max-num-seqs",
        "max-num-batched-tokens",
        "kv-tokens",
        "max-model-len",
    ):
        group.add_argument(f"--{name}", type=positive_int, help="of each engine (the profile's)")
    group.add_argument("--scheduling-policy", type=SchedulingPolicy, choices=list(SchedulingPolicy))


def _configure_results(group: "argparse._ArgumentGroup") -> None:
    configure_slo(group)
    group.add_argument(
        "--warm-up", type=_share, default=0.1, help="share of requests not measured, the first (%(default)s)"
    )
    group.add_argument("--json", type=Path, metavar="OUT", help="write metrics and provenance")
    group.add_argument(
        "--save-partition",
        type=Path,
        metavar="FILE",
        help="write the queues in force at the end of the first run that learned any, for --partition",
    )
    group.add_argument("--plot", type=Path, metavar="DIR", help="write pictures")
    add_report_argument(group)
    group.add_argument("--log", type=Path, metavar="FILE", help="write every decision, a JSON object a line")
    group.add_argument(
        "--jobs",
        type=positive_int,
        default=os.cpu_count() or 1,
        help="processes (one for each core); --log needs one",
    )


def runs(args: argparse.Namespace, learned: PartitionSource) -> list[RunSettings]:
    """One run for each policy and seed, all at the rate of the trace or of `--rate`.

    Args:
        learned: what makes the learner of `--partition learned`.

    Raises:
        ServeAppError: no run can be made of these arguments.
        ValueError: an argument is out of range.
    """
    partition = partition_source(args.partition, learned)
    return [
        RunSettings(
            policy=policy.strip(),
            fleet=fleet(args),
            trace=trace_choice(args, flip_mix_at=args.short_at if args.flip_mix else None),
            seed=seed,
            rate_per_s=args.rate,
            disclosure=Disclosure(
                output_known=args.max_output == "known", queue_timeout_s=args.queue_timeout_s
            ),
            noise=LengthNoise(relative_error=args.length_noise),
            simulation=SimulationSettings(
                control_latency_s=args.control_latency, report_interval_s=args.report_interval
            ),
            scheduler=dict(setting(text, "--set") for text in args.set),
            partition=partition,
            balance=args.balance,
            slo=_slo(args),
            short_at_tokens=args.short_at,
            warm_up_ratio=args.warm_up,
        )
        for policy in args.policy.split(",")
        for seed in range(args.first_seed, args.first_seed + args.seeds)
    ]


def fleet(args: argparse.Namespace) -> FleetSettings:
    """The replicas."""
    engine = EngineChanges(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        kv_tokens=args.kv_tokens,
        max_model_len=args.max_model_len,
        scheduling_policy=args.scheduling_policy,
    )
    if args.config is not None:
        return replace(fleet_of_file(args.config, args.profile), engine=engine)
    return fleet_of(args, engine)


def _slo(args: argparse.Namespace) -> SloByLength:
    return SloByLength(
        ttft_s=args.slo_ttft_s,
        tpot_s=args.slo_tpot_s,
        long_ttft_s=args.slo_long_ttft_s,
        short_at_tokens=args.short_at,
    )


def setting(text: str, option: str) -> tuple[str, object]:
    """Read `PATH=VALUE`, the value as YAML has it."""
    path, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} takes PATH=VALUE, got {text!r}")
    return path.strip(), yaml.safe_load(value)


def _share(text: str) -> float:
    """An argument type: a finite number of at least 0."""
    return 0.0 if text.strip() in {"0", "0.0"} else positive_float(text)
