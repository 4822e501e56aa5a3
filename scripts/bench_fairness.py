#!/usr/bin/env python
"""Who gets what when there is not enough for all? Tenants, classes and engine queues, simulated.

    .venv/bin/python scripts/bench_fairness.py                         # every scene, five seeds
    .venv/bin/python scripts/bench_fairness.py --scenes light --seeds 2
    .venv/bin/python scripts/bench_fairness.py --scenes targets --plot out

Scenes (the paper's mix of lengths; load 1.0 is the rate that saturates the same replicas under FCFS):

    weights   three tenants of weights 1, 2 and 4 ask for a half and twice a quarter of three times what the
              engines can do. Over the minute from the 40th second on: what each got over what was due to it
              by weight, in the unit that its mode counts; by the time of dispatch, which is what fairness
              decides. 1 is exactly its share. Jain's index over these.
    light     a tenant with half of all requests beside 26 that share the other half, at load 1.3. TTFT of the
              26, who ask for less than their share, and of the heavy one; Jain's index over max-min shares.
    batch     interactive requests at load 0.3, alone and beside a backlog of batch work that would last for
              longer than the scene, and that backlog alone. Over the same 45 seconds.
    targets   one tenant floods at load 1.3, and every two seconds a new user asks one short question. What
              `backpressure.target_waiting` does to the new users' TTFT and to the throughput.

TTFT in seconds from arrival; means over seeds with half the width of the 95 % interval of Student's t.

What it cannot show: clients that give up, unstreamed answers, and what the control plane costs in CPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from serve_app.command import positive_int
from serve_app.metrics.confidence import interval_95
from serve_app.metrics.fairness import jain_index, jain_of_tenants
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import Distribution
from serve_app.request import PriorityClass
from serve_app.simulation.batch import parallel
from serve_app.simulation.direct import DirectSimulation
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.load import saturated_rate_per_s
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation, SimulationSettings
from serve_app.simulation.workload import Disclosure, TraceChoice, choose_trace, requests_of
from serve_app.workloads.trace import Trace, TraceRequest
from serve_app.workloads.transform import merge, scale_to_rate

Figures = Mapping[str, float]

WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
MINUTE = (40.0, 100.0)
SPAN_S = 50.0
DECODE_WEIGHT = 2.0


@dataclass(frozen=True)
class Variant:
    """A policy with its settings; no policy is no gateway."""

    name: str
    policy: str | None
    settings: Mapping[str, object] = field(default_factory=dict)
    world: SimulationSettings = field(default_factory=SimulationSettings)


def fair(policy: str, mode: str, **settings: object) -> Variant:
    """A policy with a way to count service."""
    return Variant(f"{policy}, {mode}", policy, {"fairness.mode": mode, **settings})


# Playing


def play(fleet: FleetSettings, variant: Variant, trace: Trace) -> list[RequestRecord]:
    """All requests to their end."""
    isolated = variant.policy == "ewsjf"
    plans = fleet.plans(isolated=isolated)
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    if variant.policy is None:
        return DirectSimulation(plans).run(requests)
    settings = scheduler_settings(variant.policy, fleet.routing, variant.settings)
    return Simulation(settings, plans, variant.world).run(requests)


def mix(fleet: FleetSettings, load: float, duration_s: float, seed: int, tenants: str | None = None) -> Trace:
    """The paper's mix for so long at so much of what the fleet can do."""
    rate_per_s = load * saturated_rate_per_s(fleet, TraceChoice(name="paper-mix", requests=4_000), seed)
    choice = TraceChoice(name="paper-mix", requests=max(2, round(rate_per_s * duration_s)), tenants=tenants)
    return scale_to_rate(choose_trace(choice, seed), rate_per_s)


def renamed(trace: Trace, change: Callable[[int, TraceRequest], TraceRequest]) -> Trace:
    """The trace with every request changed."""
    return replace(trace, requests=tuple(change(number, one) for number, one in enumerate(trace.requests)))


# Scenes: each gives the figures of one run


def weights(fleet: FleetSettings, variant: Variant, seed: int) -> Figures:
    """What tenants of different weight got of what was due to them."""
    trace = mix(fleet, 3.0, MINUTE[1] + 5, seed, "one=2,two=1,four=1")
    records = play(fleet, variant, trace)
    in_requests = variant.settings.get("fairness.mode") == "requests"
    served = dict.fromkeys(WEIGHTS, 0.0)
    for record in records:
        if record.dispatched_at is not None and MINUTE[0] <= record.dispatched_at < MINUTE[1]:
            served[record.tenant] += cost(record, in_requests)
    total, weight = sum(served.values()), sum(WEIGHTS.values())
    due = {tenant: served[tenant] / (total * WEIGHTS[tenant] / weight) for tenant in WEIGHTS}
    farthest = max(abs(share - 1) for share in due.values())
    return {**due, "farthest": farthest, "Jain": jain_index(due.values()) or 0.0}


def cost(record: RequestRecord, in_requests: bool) -> float:
    """What a request has cost, as fairness counts it."""
    return 1.0 if in_requests else record.prompt_tokens + DECODE_WEIGHT * record.output_tokens


def light(fleet: FleetSettings, variant: Variant, seed: int) -> Figures:
    """Light tenants beside a heavy one."""
    others = ",".join(f"t{number}=1" for number in range(1, 27))
    trace = mix(fleet, 1.3, 100.0, seed, f"heavy=26,{others}")
    records = play(fleet, variant, trace)
    lights = ttft(record for record in records if record.tenant != "heavy")
    heavy = ttft(record for record in records if record.tenant == "heavy")
    return {
        "light mean": lights.mean or 0.0,
        "light p99": lights.p99 or 0.0,
        "heavy mean": heavy.mean or 0.0,
        "heavy p99": heavy.p99 or 0.0,
        "Jain": jain_of_tenants(records) or 0.0,
        "tokens/s": whole_throughput(records),
    }


def batch(fleet: FleetSettings, variant: Variant, seed: int) -> Figures:
    """Interactive work alone and beside batch work, and batch work alone."""
    interactive = renamed(
        mix(fleet, 0.3, SPAN_S, seed),
        lambda _, one: replace(one, tenant="people", priority=PriorityClass.INTERACTIVE),
    )
    backlog = renamed(
        mix(fleet, 1.5, SPAN_S, seed + 1_000),
        lambda _, one: replace(one, arrival_s=0.0, tenant="jobs", priority=PriorityClass.BATCH),
    )
    alone = play(fleet, variant, interactive)
    both = play(fleet, variant, merge([backlog, interactive], "both"))
    jobs = play(fleet, variant, backlog)
    beside = [record for record in both if record.tenant == "people"]
    before, after = ttft(measured(alone)), ttft(measured(beside))
    assert before.p95 is not None
    assert after.p95 is not None
    return {
        "alone p50": before.p50 or 0.0,
        "alone p95": before.p95,
        "beside p50": after.p50 or 0.0,
        "beside p95": after.p95,
        "p95 ratio": after.p95 / before.p95,
        "tokens/s": throughput(both),
        "batch only": throughput(jobs),
        "ratio": throughput(both) / throughput(jobs),
    }


def targets(fleet: FleetSettings, variant: Variant, seed: int) -> Figures:
    """New users beside a flood."""
    flood = renamed(mix(fleet, 1.3, SPAN_S, seed), lambda _, one: replace(one, tenant="flood"))
    users = Trace(
        name="users",
        source="one short question every two seconds, each of a new tenant",
        requests=tuple(
            TraceRequest(
                arrival_s=5.0 + 2.0 * number, prompt_tokens=64, output_tokens=64, tenant=f"u{number}"
            )
            for number in range(int((SPAN_S - 6) / 2))
        ),
    )
    records = play(fleet, variant, merge([flood, users], "both"))
    new = ttft(record for record in records if record.tenant != "flood")
    return {
        "new user mean": new.mean or 0.0,
        "p95": new.p95 or 0.0,
        "max": new.max or 0.0,
        "tokens/s": throughput(records),
    }


def ttft(records: Iterable[RequestRecord]) -> Distribution:
    """Of those with a first token."""
    return Distribution.of(one.ttft_s for one in records if one.ttft_s is not None)


def measured(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that arrived after the first five seconds, in which queues fill."""
    return [record for record in records if record.arrived_at >= SPAN_S / 10]


def throughput(records: Sequence[RequestRecord]) -> float:
    """Tokens per second that engines worked off between the fifth second and the end of the scene."""
    began, ended = SPAN_S / 10, SPAN_S
    return sum(worked(one, ended) - worked(one, began) for one in records) / (ended - began)


def whole_throughput(records: Sequence[RequestRecord]) -> float:
    """Tokens per second of a run to its end."""
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    return tokens / max(record.finished_at for record in records)


def worked(record: RequestRecord, until: float) -> float:
    """Prompt and output tokens by then; the prompt as soon as the first token is there."""
    if record.first_token_at is None or until < record.first_token_at:
        return 0.0
    if until >= record.finished_at:
        return record.prompt_tokens + record.output_tokens
    share = (until - record.first_token_at) / (record.finished_at - record.first_token_at)
    return record.prompt_tokens + share * record.output_tokens


def swept(policy: str) -> list[Variant]:
    """The targets of the sweep, with reports that are up to a quarter of a second old."""
    late = SimulationSettings(report_interval_s=0.25)
    return [
        Variant(
            f"{policy}, {target if target < UNLIMITED else 'unlimited'}",
            policy,
            {
                "backpressure.target_waiting": target,
                "backpressure.max_prefill_backlog_s": 4.0 if target < UNLIMITED else 1e9,
            },
            late,
        )
        for target in (1, 2, 3, 5, 8, 16, UNLIMITED)
    ]


UNLIMITED = 100_000
SCENES: dict[str, tuple[Callable[[FleetSettings, Variant, int], Figures], Sequence[Variant]]] = {
    "weights": (
        weights,
        [
            fair(policy, mode, **{"fairness.weights": WEIGHTS})
            for policy in ("fcfs", "ewsjf")
            for mode in ("requests", "tokens")
        ],
    ),
    "light": (
        light,
        [
            Variant("no gateway", None),
            *(fair(policy, mode) for policy in ("fcfs", "ewsjf") for mode in ("off", "requests", "tokens")),
        ],
    ),
    "batch": (batch, [Variant("fcfs", "fcfs"), Variant("ewsjf", "ewsjf")]),
    "targets": (targets, [*swept("fcfs"), *swept("ewsjf")]),
}


def main() -> int:
    """Play and print."""
    args = arguments()
    fleet = FleetSettings(profile=args.profile, replicas={ONE_POOL: args.replicas})
    print(f"{args.replicas} replicas of {args.profile}, {args.seeds} seeds\n")
    for name in args.scenes.split(","):
        scene, variants = SCENES[name.strip()]
        runs = [partial(scene, fleet, variant, seed) for variant in variants for seed in range(args.seeds)]
        figures = list(parallel(call, runs, args.jobs))
        rows = [figures[at : at + args.seeds] for at in range(0, len(figures), args.seeds)]
        print(f"### {name}\n\n{table([variant.name for variant in variants], rows)}\n", flush=True)
        if name == "targets" and args.plot:
            print(f"{plotted(args.plot, variants, rows)}\n")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", default=",".join(SCENES), help="(%(default)s)")
    parser.add_argument("--seeds", type=positive_int, default=5, help="(%(default)s)")
    parser.add_argument("--profile", default="llama2-70b-h100-tp4", help="(%(default)s)")
    parser.add_argument("--replicas", type=positive_int, default=4, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=2, help="processes (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write the sweep of targets as a picture")
    args = parser.parse_args()
    unknown = [name for name in args.scenes.split(",") if name.strip() not in SCENES]
    if unknown:
        parser.error(f"no scene {', '.join(unknown)}: choose of {', '.join(SCENES)}")
    return args


def call(run: Callable[[], Figures]) -> Figures:
    """One run, in a process of its own."""
    return run()


def table(names: Sequence[str], rows: Sequence[Sequence[Figures]]) -> str:
    """Markdown: a line for each variant."""
    columns = list(rows[0][0])
    lines = ["| |" + "|".join(f" {column} " for column in columns) + "|", "|---" * (len(columns) + 1) + "|"]
    for name, runs in zip(names, rows, strict=True):
        cells = [cell([run[column] for run in runs]) for column in columns]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """A mean and half its interval."""
    interval = interval_95(values)
    digits = 0 if interval.mean >= 1_000 else 3
    half = "" if interval.high is None else f" ± {interval.high - interval.mean:,.{digits}f}"
    return f"{interval.mean:,.{digits}f}{half}"


def plotted(folder: Path, variants: Sequence[Variant], rows: Sequence[Sequence[Figures]]) -> Path:
    """TTFT of a new user against throughput, a point for each target."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(variant.policy for variant in variants):
        points = [
            (
                interval_95([run["tokens/s"] for run in runs]).mean,
                interval_95([run["p95"] for run in runs]).mean,
                variant,
            )
            for variant, runs in zip(variants, rows, strict=True)
            if variant.policy == policy
        ]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=policy)
        for x, y, variant in points:
            axes.annotate(variant.name.split(", ")[1], (x, y), textcoords="offset points", xytext=(5, 4))
    axes.set(xlabel="tokens per second", ylabel="TTFT of a new user, p95, s", yscale="log")
    axes.set_title("Requests in an engine's own queue: what the target does")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "targets.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    sys.exit(main())
