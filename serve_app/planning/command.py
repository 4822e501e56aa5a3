"""The command `python -m serve_app plan`: a fleet for a workload and its latency limits."""

import argparse

from serve_app.command import Command, command_line, given_arguments, progress_bar, say, warn, write_json
from serve_app.planning import arguments
from serve_app.planning.configuration import best_fleet, configuration
from serve_app.planning.plan import Effort, Plan, make_plan, steps
from serve_app.planning.report_page import plan_report
from serve_app.planning.results import plan_as_json, table, verdict
from serve_app.planning.sizing.costs import CostTable
from serve_app.provenance import provenance
from serve_app.reports.document import Origin
from serve_app.reports.page import write_report
from serve_app.tables import paragraph
from serve_app.workloads.catalog import notes_on

_EXAMPLE = """example:
  python -m serve_app plan --trace azure-conv+azure-code --profile llama2-70b-h100-tp4 --rate 100 \\
      --slo-ttft-s 2 --slo-tpot-s 0.08 --plot out
"""


def _run(args: argparse.Namespace) -> int:
    options, demand = arguments.fleet_options(args), arguments.demand(args)
    effort = Effort(seeds=range(args.seeds), stand_in_replicas=args.stand_in, jobs=args.jobs)
    costs = CostTable.load(args.costs)
    with progress_bar("fleets", steps(options)) as advance:
        plan = make_plan(options, demand, costs, effort, lambda _: advance())
    say(f"{paragraph(_heading(plan))}\n\n{table(plan.result)}\n\n{paragraph(verdict(plan.result))}")
    warnings = _warnings(plan, args.seeds)
    for line in warnings:
        warn(line)
    if args.config is not None:
        _write_config(args, plan, costs)
    found = provenance(plan.workload.trace, given_arguments(args), effort.seeds)
    if args.json is not None:
        twice = {name: one.as_json() for name, one in plan.twice.items()}
        document = plan_as_json(plan.result) | {"stand_ins_at_twice_the_size": twice}
        write_json(args.json, document | {"provenance": found})
    if args.plot is not None:
        # The plotting library takes half a second to load, which runs without plots need not wait for.
        from serve_app.planning.plots import write_plots  # noqa: PLC0415 - see above

        write_plots(args.plot, plan.result, plan.verifier)
    if args.report is not None:
        write_report(args.report, plan_report(plan, Origin(found, command_line(args)), warnings))
    return 0


def _write_config(args: argparse.Namespace, plan: Plan, costs: CostTable) -> None:
    best = best_fleet(plan.result)
    if best is None:
        warn(f"no fleet meets the limits, so --config writes no {args.config}")
        return
    args.config.parent.mkdir(parents=True, exist_ok=True)
    args.config.write_text(configuration(best, plan.demand, costs, args.model), encoding="utf-8")
    pools = ", ".join(f"{count:,} in pool {pool}" for pool, count in best.counts.items())
    say(f"\n{args.config}: {best.plan.name}, {pools}")


def _heading(plan: Plan) -> str:
    share, demand = plan.verifier.share, plan.demand
    size = (
        f"simulated at {share:.3g} of its size, numbers scaled up"
        if share < 1
        else "simulated at its full size"
    )
    ttft_s, tpot_s = demand.slo.ttft_s, demand.slo.tpot_s
    assert ttft_s is not None
    assert tpot_s is not None
    return (
        f"{plan.workload.trace.title} at {demand.rate_per_s:g} requests/s, P99 TTFT <= {ttft_s:g} s and "
        f"P99 TPOT <= {1_000 * tpot_s:g} ms, policy {demand.policy}; {size}, "
        f"{demand.trace.requests:,} requests a run; means over seeds ± 95 % interval; long: more than "
        f"{demand.long_above_tokens:,} tokens; > marks the chosen"
    )


def _warnings(plan: Plan, seeds: int) -> list[str]:
    workload = plan.workload
    lines = list(notes_on(workload.trace))
    if workload.dropped:
        every = workload.dropped + len(workload.trace.requests)
        lines.append(
            f"{workload.dropped:,} of {every:,} requests are longer than the profile's context and were "
            "dropped for every fleet"
        )
    lines += [
        f"{name}: its stand-in meets the limits, twice as many replicas at twice the rate do not: "
        "raise --stand-in"
        for name, one in plan.twice.items()
        if not one.meets
    ]
    if plan.result.worst_case is None:
        lines.append("the worst-case fleet meets the limits at no size that was tried")
    if seeds < 3:
        lines.append(f"--seeds {seeds}: fewer than three seeds give no useful interval")
    return lines


COMMAND = Command(
    name="plan",
    summary="size a fleet to latency limits: one pool or two, verified in simulation",
    example=_EXAMPLE,
    configure=arguments.configure,
    run=_run,
)
