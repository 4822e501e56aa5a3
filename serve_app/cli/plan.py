"""Command `plan`: sizes a fleet for a workload and its latency limits."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from serve_app.cli.command import (
    add_jobs,
    add_number,
    add_settings,
    add_whole,
    arguments_as_json,
    positive_float,
    positive_int,
    print_result,
    progress_bar,
    warn,
    write_json,
    write_text,
)
from serve_app.cli.workload_arguments import (
    configure_max_output,
    configure_profile,
    configure_trace,
    settings_of,
)
from serve_app.core.metrics.summary import Slo
from serve_app.core.policies import POLICIES
from serve_app.lab.planning.plan import (
    Effort,
    FleetOptions,
    Plan,
    configuration,
    fleets_table,
    make_plan,
    plan_as_json,
    steps,
    verdict,
)
from serve_app.lab.planning.queueing import CostTable
from serve_app.lab.planning.verification import LONG_ABOVE_TOKENS, Workload
from serve_app.lab.provenance import provenance
from serve_app.lab.tables import paragraph
from serve_app.lab.workloads import TraceChoice, notes_on

TRACE_ARRIVALS = "trace"
"""Choice of `--arrivals`: the trace's arrival pattern, scaled to the rate."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add all arguments."""
    _configure_demand(parser.add_argument_group("demand"))
    _configure_fleets(parser.add_argument_group("fleets"))
    _configure_simulation(parser.add_argument_group("simulation"))


def _configure_demand(group: "argparse._ArgumentGroup") -> None:
    configure_trace(
        group,
        arrivals="poisson",
        arrivals_help=f"poisson, gamma:CV, on-off:ON,OFF in requests, or {TRACE_ARRIVALS} for the trace's "
        "pattern scaled to the rate (default: %(default)s)",
    )
    group.add_argument("--rate", type=positive_float, required=True, help="peak rate in requests per second")
    add_number(group, "--slo-ttft-s", "limit of the P99 TTFT", 2.0)
    add_number(group, "--slo-tpot-s", "limit of the P99 TPOT", 0.08)
    configure_max_output(group)


def _configure_fleets(group: "argparse._ArgumentGroup") -> None:
    configure_profile(group)
    for pool in ("short", "long"):
        text = f"additional profiles for the {pool} pool"
        group.add_argument(f"--{pool}-profile", type=_names, default=(), metavar="NAME[,NAME]", help=text)
    group.add_argument(
        "--b-short",
        type=_numbers,
        default=(1_024, 2_048, 4_096, 8_192),
        metavar="TOKENS[,TOKENS]",
        help="values of B_short to try (default: 1024,2048,4096,8192)",
    )
    group.add_argument(
        "--profile-settings-only", action="store_true", help="try only the batch settings of the profiles"
    )
    group.add_argument("--costs", type=Path, metavar="FILE", help="YAML file with costs per GPU hour")


def _configure_simulation(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--policy", default="ewsjf", choices=sorted(POLICIES), help="scheduling policy (default: %(default)s)"
    )
    add_settings(group, "scheduler setting")
    add_whole(group, "--seeds", "number of seeds per final size", 3)
    add_whole(
        group,
        "--requests",
        "requests per run (default: the arrivals of one minute, or of three times the longest response)",
    )
    add_whole(
        group,
        "--max-simulated-replicas",
        "maximum number of replicas to simulate; a larger fleet is scaled down with its rate",
        24,
        metavar="REPLICAS",
    )
    add_whole(group, "--candidates", "fleets of each kind to simulate, best first according to the model", 3)
    add_jobs(group)
    group.add_argument("--json", type=Path, metavar="OUT", help="write the fleets and their provenance")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="write a configuration of the cheapest fleet"
    )
    group.add_argument(
        "--model", help="with --config: vLLM engines with this model (default: emulated engines)"
    )


def fleet_options(args: argparse.Namespace) -> FleetOptions:
    """Return the profiles, boundaries and settings to choose from."""
    return FleetOptions(
        profile=args.profile,
        short_profiles=args.short_profile,
        long_profiles=args.long_profile,
        b_short_tokens=args.b_short,
        variants=not args.profile_settings_only,
        candidates=args.candidates,
    )


def demand_of(args: argparse.Namespace) -> Workload:
    """Return the workload of the fleets. Without `--requests` the planner chooses their number."""
    return Workload(
        trace=TraceChoice(
            name=args.trace,
            requests=args.requests,
            folder=args.traces_folder,
            arrivals=None if args.arrivals == TRACE_ARRIVALS else args.arrivals,
        ),
        rate_per_s=args.rate,
        slo=Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s),
        output_known=args.max_output == "known",
        policy=args.policy,
        scheduler=settings_of(args),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(number) for number in text.split(","))


EXAMPLE = """example:
  ewsjf plan --trace azure-conv+azure-code --profile llama2-70b-h100-tp4 --rate 100 \\
      --slo-ttft-s 2 --slo-tpot-s 0.08 --config out/plan.yaml
"""


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    options, demand = fleet_options(args), demand_of(args)
    effort = Effort(
        seeds=range(args.seeds), max_simulated_replicas=args.max_simulated_replicas, jobs=args.jobs
    )
    costs = CostTable.load(args.costs)
    with progress_bar("fleets", steps(options)) as advance:
        plan = make_plan(options, demand, costs, effort, lambda _: advance())
    print_result(
        f"{paragraph(_heading(plan))}\n\n{fleets_table(plan.result)}\n\n{paragraph(verdict(plan.result))}"
    )
    for line in _warnings(plan, args.seeds):
        warn(line)
    if args.config is not None:
        _write_config(args, plan, costs)
    if args.json is not None:
        double_scale = {name: one.as_json() for name, one in plan.double_scale.items()}
        document = plan_as_json(plan.result) | {"fleets_at_double_scale": double_scale}
        found = provenance(plan.workload.trace.provenance(), arguments_as_json(args), effort.seeds)
        write_json(args.json, document | {"provenance": found})
    return 0


def _write_config(args: argparse.Namespace, plan: Plan, costs: CostTable) -> None:
    best = plan.result.best
    if best is None:
        warn(f"no fleet meets the limits, so {args.config} is not written")
        return
    write_text(args.config, configuration(best, plan.demand, costs, args.model))
    pools = ", ".join(f"{count:,} in pool {pool}" for pool, count in best.counts.items())
    print_result(f"\n{args.config}: {best.plan.name}, {pools}")


def _heading(plan: Plan) -> str:
    share, demand = plan.verifier.share, plan.demand
    size = (
        f"simulated at {share:.3g} of its size, results scaled up" if share < 1 else "simulated at full size"
    )
    ttft_s, tpot_s = demand.slo.ttft_s, demand.slo.tpot_s
    assert ttft_s is not None
    assert tpot_s is not None
    return (
        f"{plan.workload.trace.title} at {demand.rate_per_s:g} requests/s, P99 TTFT <= {ttft_s:g} s and "
        f"P99 TPOT <= {1_000 * tpot_s:g} ms, policy {demand.policy}; {size}, "
        f"{demand.trace.requests:,} requests per run; means over seeds ± 95 % interval; long: more than "
        f"{LONG_ABOVE_TOKENS:,} tokens; > marks the fleet to choose"
    )


def _warnings(plan: Plan, seeds: int) -> Iterator[str]:
    workload = plan.workload
    yield from notes_on(workload.trace)
    if workload.dropped:
        every = workload.dropped + len(workload.trace.requests)
        yield (
            f"{workload.dropped:,} of {every:,} requests exceed the profile's context limit and were "
            "excluded for all fleets"
        )
    for name, one in plan.double_scale.items():
        if not one.meets:
            yield (
                f"{name}: the scaled-down fleet meets the limits, but twice as many replicas at twice the "
                "rate do not: raise --max-simulated-replicas"
            )
    if plan.result.worst_case is None:
        yield "the worst-case fleet meets the limits at none of the simulated sizes"
    if seeds < 3:
        yield f"--seeds {seeds}: fewer than three seeds give no useful confidence interval"
