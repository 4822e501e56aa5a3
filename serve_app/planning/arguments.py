"""The arguments of `python -m serve_app plan`, and the settings that they make."""

import argparse
import os
from pathlib import Path

from serve_app.command import add_report_argument, positive_float, positive_int
from serve_app.metrics.slo import Slo
from serve_app.planning.sizing.candidates import FleetOptions
from serve_app.planning.sizing.verification import Workload
from serve_app.scheduling.policies import POLICIES
from serve_app.simulation.command.arguments import setting
from serve_app.simulation.command.workload_arguments import configure_max_output, configure_trace
from serve_app.simulation.workload import TraceChoice

TRACE_ARRIVALS = "trace"
"""Keep the arrival pattern of the trace, scaled to the rate."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add every argument."""
    _configure_demand(parser.add_argument_group("demand"))
    _configure_fleets(parser.add_argument_group("fleets"))
    _configure_simulation(parser.add_argument_group("simulation"))


def _configure_demand(group: "argparse._ArgumentGroup") -> None:
    configure_trace(
        group,
        arrivals="poisson",
        arrivals_help=f"poisson, gamma:CV, on-off:ON,OFF in requests, or {TRACE_ARRIVALS}: the trace's own "
        "pattern, scaled to the rate (%(default)s)",
    )
    group.add_argument("--rate", type=positive_float, required=True, help="requests per second at the peak")
    group.add_argument(
        "--slo-ttft-s", type=positive_float, default=2.0, help="limit of the P99 TTFT (%(default)s)"
    )
    group.add_argument(
        "--slo-tpot-s", type=positive_float, default=0.08, help="limit of the P99 TPOT (%(default)s)"
    )
    configure_max_output(group)
    group.add_argument(
        "--long-above",
        type=positive_int,
        default=4_096,
        metavar="TOKENS",
        help="a request with more tokens, prompt and answer, counts as long in the figures (%(default)s)",
    )


def _configure_fleets(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--profile", default="llama2-70b-h100-tp4", help="name or YAML file (%(default)s)")
    group.add_argument("--short-profile", type=_names, default=(), metavar="NAME[,NAME]")
    group.add_argument("--long-profile", type=_names, default=(), metavar="NAME[,NAME]")
    group.add_argument(
        "--b-short",
        type=_numbers,
        default=(1_024, 2_048, 4_096, 8_192),
        metavar="TOKENS[,TOKENS]",
        help="values of B_short to try (1024,2048,4096,8192)",
    )
    group.add_argument(
        "--worst-case-seqs",
        type=positive_int,
        help="max_num_seqs of the worst-case fleet (KV cache over the longest context, at most 64K)",
    )
    group.add_argument(
        "--profile-settings-only",
        action="store_true",
        help="try no other batch settings than those of the profiles",
    )
    group.add_argument("--costs", type=Path, metavar="FILE", help="YAML table of costs per GPU hour")


def _configure_simulation(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--policy", default="ewsjf", choices=sorted(POLICIES), help="(%(default)s)")
    group.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a scheduler setting")
    group.add_argument("--seeds", type=positive_int, default=3, help="of the final sizes (%(default)s)")
    group.add_argument(
        "--requests",
        type=positive_int,
        help="in each run (the arrivals of a minute, or of three times the longest answer)",
    )
    group.add_argument(
        "--stand-in",
        type=positive_int,
        default=24,
        metavar="REPLICAS",
        help="simulate a larger fleet at a share of its size and rate (%(default)s)",
    )
    group.add_argument(
        "--candidates",
        type=positive_int,
        default=3,
        help="fleets of each kind to simulate, the best by the model (%(default)s)",
    )
    group.add_argument("--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (all cores)")
    group.add_argument("--json", type=Path, metavar="OUT", help="write fleets and provenance")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="write a configuration of the cheapest fleet found",
    )
    group.add_argument("--model", help="with --config: engines of vLLM with this model (emulated engines)")
    group.add_argument("--plot", type=Path, metavar="DIR", help="write pictures")
    add_report_argument(group)


def fleet_options(args: argparse.Namespace) -> FleetOptions:
    """The profiles, borders and settings to choose from."""
    return FleetOptions(
        profile=args.profile,
        short_profiles=args.short_profile,
        long_profiles=args.long_profile,
        b_short_tokens=args.b_short,
        worst_case_slots=args.worst_case_seqs,
        variants=not args.profile_settings_only,
        candidates=args.candidates,
    )


def demand(args: argparse.Namespace) -> Workload:
    """The workload of the fleets; without `--requests` the number of requests is left open."""
    return Workload(
        trace=TraceChoice(
            name=args.trace,
            requests=args.requests,
            folder=args.traces_folder,
            arrivals=None if args.arrivals == TRACE_ARRIVALS else args.arrivals,
        ),
        rate_per_s=args.rate,
        slo=Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s),
        long_above_tokens=args.long_above,
        output_known=args.max_output == "known",
        policy=args.policy,
        scheduler=dict(setting(text, "--set") for text in args.set),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(number) for number in text.split(","))
