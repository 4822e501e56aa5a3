#!/usr/bin/env python
"""Does a fleet that the planner sized keep its limits when it is served? Live, with emulated engines.

    .venv/bin/python scripts/bench_planned_fleet.py --rate 12 --minutes 4 --repeats 3 --json out/planned.json
    .venv/bin/python scripts/bench_planned_fleet.py --plan-only

Plans two pools for a trace at `--rate`, starts an application with exactly these pools and replicas, each an
emulated engine of the planned profile and settings, and plays the trace against it over HTTP: an open loop,
streams, no `max_tokens` (as the plan assumes), autoscaling off. A repeat is a seed; seed by seed the same
requests are also simulated, at the same times, for as long.

Columns, by pool that served and for all:

    planned      what the plan's own simulation says, longer runs; mean over its seeds
    simulated    the fleet in the simulator under the very requests of the live runs
    observed     from the live runs

Each but `planned` as mean and half the width of the 95 % interval of Student's t over repeats. TTFT counts
from when the client meant to send. The first tenth of each run is not measured. `within` is the share of the
measured requests that complete within both limits; `lost` are requests of whole runs that did not complete.

What differs between the columns: live, the scheduler estimates prompts from bytes and learns, and a gateway,
sockets and a client take their part. In the simulation lengths of prompts are exact.

What it cannot show: a real engine. Emulated engines step by the profile's model in real time, on the same
cores as everything else: `late` (requests that the client sent more than 50 ms late) and the cores that each
part used tell whether the machine kept up. Preemptions are known of the simulations alone.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml
from bench_overhead import role_of

from experiments.common.application import free_port, started_application
from experiments.common.processes import CpuMeter
from serve_app.bench.bodies import BenchEndpoint, BodyFactory, BodyKind, BodySettings
from serve_app.bench.connection import BenchError, ConnectionPool, Target
from serve_app.bench.load import LoadResult, LoadSettings, OpenLoop
from serve_app.command import positive_float, positive_int, say, warn, write_json
from serve_app.errors import ServeAppError
from serve_app.metrics.confidence import interval_95
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.slo import Slo, slo_attainment_ratio
from serve_app.metrics.statistics import percentile
from serve_app.planning.costs import CostTable
from serve_app.planning.plan import Effort, make_plan
from serve_app.planning.sizing.candidates import FleetOptions, SizedFleet
from serve_app.planning.sizing.verification import RunFigures, Verification, Verifier, Workload
from serve_app.provenance import commit, hardware, load_average
from serve_app.simulation.workload import TraceChoice, at_rate, choose_trace, fit
from serve_app.workloads.trace import Trace

MODEL = "planned"
ALL = "all"
WARM_UP_RATIO = 0.1
# Nobody is refused for having waited: the plan's simulation refuses nobody either.
PATIENCE_S = 3_600.0


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What one live run showed; the keys of the tails are pools and `all`."""

    seed: int
    requests: int
    lost: int
    late: int
    within: float
    p99_ttft_s: dict[str, float]
    p99_tpot_s: dict[str, float]
    cores: dict[str, float]
    load_average: list[float] | None


def main() -> int:
    """Plan, start, play, print."""
    args = arguments()
    try:
        return run(args)
    except ServeAppError as exc:
        warn(f"bench_planned_fleet: {exc}")
        return 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="azure-conv+azure-code", help="(%(default)s)")
    parser.add_argument("--profile", default="llama2-70b-h100-tp4", help="(%(default)s)")
    parser.add_argument("--rate", type=positive_float, default=12.0, help="requests per second (%(default)s)")
    parser.add_argument("--minutes", type=positive_float, default=4.0, help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=3, help="(%(default)s)")
    parser.add_argument("--slo-ttft-s", type=positive_float, default=2.0, help="P99 limit (%(default)s)")
    parser.add_argument("--slo-tpot-s", type=positive_float, default=0.08, help="P99 limit (%(default)s)")
    parser.add_argument("--b-short", type=positive_int, nargs="+", default=[2_048, 4_096], help="to try")
    parser.add_argument("--plan-requests", type=positive_int, default=4_000, help="in each of its runs")
    parser.add_argument("--plan-seeds", type=positive_int, default=3, help="(%(default)s)")
    parser.add_argument("--plan-only", action="store_true", help="show the plan, and serve nothing")
    parser.add_argument("--log", type=Path, help="of the application")
    parser.add_argument("--json", type=Path, help="write the figures, with provenance")
    return parser.parse_args()


def run(args: argparse.Namespace) -> int:
    """All that is asked for."""
    demand = Workload(
        trace=TraceChoice(name=args.trace, requests=args.plan_requests, arrivals="poisson"),
        rate_per_s=args.rate,
        slo=Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s),
    )
    fleet = planned(args, demand)
    say(f"planned: {describe(fleet)}")
    if args.plan_only:
        return 0
    traces = [live_trace(args, fleet, seed) for seed in range(args.repeats)]
    simulated = simulated_runs(args, fleet, demand)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(application(fleet)), encoding="utf-8")
        with started_application(config, args.log or Path(folder) / "serve.log") as (pid, url):
            observed = [play(trace, seed, pid, url, demand.slo) for seed, trace in enumerate(traces)]
    say(table(fleet.verification, simulated, observed))
    say(circumstances(fleet.verification, simulated, observed))
    if args.json is not None:
        write_json(args.json, document(args, fleet, simulated, observed))
    return 0


def planned(args: argparse.Namespace, demand: Workload) -> SizedFleet:
    """The two pools of the plan.

    Raises:
        BenchError: no two pools keep the limits.
    """
    space = FleetOptions(profile=args.profile, b_short_tokens=tuple(args.b_short), candidates=1)
    plan = make_plan(space, demand, CostTable.load(), Effort(seeds=range(args.plan_seeds)))
    if plan.result.pools is None:
        raise BenchError("no two pools keep the limits: relax them, or choose another profile")
    if plan.result.pools.share < 1:
        raise BenchError(f"a fleet for {args.rate:g} requests/s is too large to be served here: lower --rate")
    return plan.result.pools


def describe(fleet: SizedFleet) -> str:
    """The pools in a line."""
    pools = "; ".join(f"{pool} {fleet.counts[pool]} x {plan}" for pool, plan in fleet.plan.pools.items())
    return f"{pools}; B_short {fleet.plan.b_short_tokens:,}"


def live_trace(args: argparse.Namespace, fleet: SizedFleet, seed: int) -> Trace:
    """The requests of one run, as the simulation of that seed has them."""
    return at_rate(fit(choose_trace(live_choice(args), seed), fleet.plan.context_tokens()).trace, args.rate)


def live_choice(args: argparse.Namespace) -> TraceChoice:
    """As many requests as come in the time of a run, before those that no engine can take are left out."""
    requests = max(10, round(60 * args.minutes * args.rate))
    return TraceChoice(name=args.trace, requests=requests, arrivals="poisson")


def simulated_runs(args: argparse.Namespace, fleet: SizedFleet, demand: Workload) -> tuple[RunFigures, ...]:
    """The fleet in the simulator, under the requests of the live runs."""
    same = Workload(trace=live_choice(args), rate_per_s=demand.rate_per_s, slo=demand.slo)
    return Verifier(same).measure(fleet.plan, fleet.counts, range(args.repeats)).runs


# The application


def application(fleet: SizedFleet) -> dict[str, Any]:
    """A model in the planned pools, in front of emulated engines as the simulator has them."""
    scheduler = {
        "policy": fleet.verification.demand.policy,
        "max_waiting": 1_000_000,
        "queue_timeout_s": {"interactive": PATIENCE_S, "default": PATIENCE_S},
        "backpressure": {"tpot_gate_s": None},
        "routing": {"b_short_tokens": fleet.plan.b_short_tokens},
    }
    model = {"name": MODEL, "pools": pools(fleet), "scheduler": scheduler}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "planned-fleet",
                "route_prefix": "/",
                "import_path": "serve_app.app:build_app",
                "args": {"models": [model], "gateways": {"replicas": 1, "num_cpus": 0.2}},
            }
        ],
    }


def pools(fleet: SizedFleet) -> list[dict[str, Any]]:
    """Each planned pool as settings, with a fixed number of replicas."""
    one_of_each = fleet.plan.settings(dict.fromkeys(fleet.plan.pools, 1)).plans(isolated=True)
    return [
        {
            "name": plan.pool,
            "engine": {
                "emulated": {
                    "profile": fleet.plan.pools[plan.pool].profile,
                    "max_model_len": plan.engine.max_model_len,
                    "max_num_seqs": plan.engine.max_num_seqs,
                    "max_num_batched_tokens": plan.engine.max_num_batched_tokens,
                    "kv_tokens": plan.engine.kv_blocks * plan.engine.block_size,
                    "long_prefill_token_threshold": plan.engine.long_prefill_token_threshold,
                    "scheduling_policy": plan.engine.scheduling_policy.value,
                }
            },
            "resources": {"num_cpus": 0.05},
            "replicas": fleet.counts[plan.pool],
        }
        for plan in one_of_each
    ]


# Live


def play(trace: Trace, seed: int, serve_pid: int, url: str, slo: Slo) -> LiveRun:
    """One live run, in figures."""
    meter = CpuMeter((serve_pid,), role_of)
    before, began = meter.read(), time.monotonic()
    load = uvloop.run(drive(trace, Target.parse(url)))
    seconds = time.monotonic() - began
    used = meter.used_since(before, seconds)
    records = sorted(load.records, key=lambda record: record.arrived_at)
    measured = records[round(WARM_UP_RATIO * len(records)) :]
    live = LiveRun(
        seed=seed,
        requests=len(records),
        lost=sum(not record.completed for record in records),
        late=load.client.late,
        within=slo_attainment_ratio(measured, slo) or 0.0,
        p99_ttft_s=tails(measured, lambda record: record.ttft_s),
        p99_tpot_s=tails(measured, lambda record: record.tpot_s),
        cores={role: cpu_s / seconds for role, cpu_s in sorted(used.items())},
        load_average=load_average(),
    )
    warn(f"run {seed + 1}: {live.requests} requests, {live.lost} lost, P99 TTFT {live.p99_ttft_s}")
    return live


async def drive(trace: Trace, target: Target) -> LoadResult:
    """Send everything at its time; bodies state no limit, engines are told the length of the answer."""
    pool = ConnectionPool(target)
    bodies = BodySettings(model=MODEL, kind=BodyKind.EMULATED, endpoint=BenchEndpoint.CHAT, max_tokens=0)
    try:
        loop = OpenLoop(pool, BodyFactory(bodies, target.authority), LoadSettings(timeout_s=PATIENCE_S))
        return await loop.run(trace)
    finally:
        pool.close()


def tails(
    records: Sequence[RequestRecord], figure: Callable[[RequestRecord], float | None]
) -> dict[str, float]:
    """The P99 of what completed, by the pool that served and of all."""
    values: dict[str, list[float]] = {}
    for record in records:
        value = figure(record)
        if record.completed and value is not None:
            for group in (ALL, record.pool or "?"):
                values.setdefault(group, []).append(value)
    return {group: percentile(sorted(own), 99) for group, own in sorted(values.items())}


# Results


def table(plan: Verification, simulated: Sequence[RunFigures], observed: Sequence[LiveRun]) -> str:
    """Markdown: a line for each pool and figure."""
    lines = ["| P99 | requests of | planned | simulated | observed | limit |", "|---|---|---|---|---|---|"]
    for figure, unit, factor, limit in (
        ("ttft", "s", 1.0, plan.demand.slo.ttft_s),
        ("tpot", "ms", 1_000.0, plan.demand.slo.tpot_s),
    ):
        name = f"p99_{figure}_s"
        for group in (ALL, *plan.plan.pools):
            live = [getattr(one, name).get(group) for one in observed]
            cells = (
                plus_minus(of_simulation(plan.runs, name, group), factor, interval=False),
                plus_minus(of_simulation(simulated, name, group), factor),
                plus_minus([value for value in live if value is not None], factor),
                "-" if limit is None or group != ALL else f"{factor * limit:g}",
            )
            lines.append(f"| {figure.upper()} {unit} | {group} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_simulation(runs: Sequence[RunFigures], name: str, group: str) -> list[float]:
    """A tail of each run, as far as the pool served anybody."""
    values = [
        getattr(one, name) if group == ALL else getattr(one.by_pool.get(group), name, None) for one in runs
    ]
    return [value for value in values if value is not None]


def plus_minus(values: Sequence[float], factor: float, *, interval: bool = True) -> str:
    """The mean, and half the width of its interval; a dash without values."""
    if not values:
        return "-"
    found = interval_95([factor * value for value in values])
    if found.high is None or not interval:
        return f"{found.mean:.3g}"
    return f"{found.mean:.3g} +- {found.high - found.mean:.2g}"


def circumstances(plan: Verification, simulated: Sequence[RunFigures], observed: Sequence[LiveRun]) -> str:
    """What else there is to know."""
    cores = {
        role: sum(one.cores.get(role, 0.0) for one in observed) / len(observed) for role in observed[0].cores
    }
    return "\n".join(
        (
            "",
            f"within both limits: {plus_minus([100 * one.within for one in observed], 1.0)} %",
            f"lost: {sum(one.lost for one in observed)} of {sum(one.requests for one in observed)} live",
            f"lost: {sum(one.lost for one in simulated)} simulated",
            f"late: {sum(one.late for one in observed)}",
            f"preemptions simulated: {sum(one.preemptions for one in simulated)}",
            f"preemptions planned: {plan.preemptions_per_mille:.2f} per thousand requests",
            "cores: " + ", ".join(f"{role} {used:.2f}" for role, used in cores.items()),
            f"load average {load_average()}",
        )
    )


def document(
    args: argparse.Namespace,
    fleet: SizedFleet,
    simulated: Sequence[RunFigures],
    observed: Sequence[LiveRun],
) -> dict[str, object]:
    """All figures, for a file."""
    return {
        "plan": fleet.plan.as_json()
        | {"replicas": dict(fleet.counts), "verification": fleet.verification.as_json()},
        "planned": [asdict(one) for one in fleet.verification.runs],
        "simulated": [asdict(one) for one in simulated],
        "observed": [asdict(one) for one in observed],
        "provenance": {
            "commit": commit(),
            "settings": {name: str(value) for name, value in vars(args).items()},
            "hardware": hardware(),
            "load_average": load_average(),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
