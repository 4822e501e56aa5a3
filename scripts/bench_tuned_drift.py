#!/usr/bin/env python
"""What does tuning bring a running system whose traffic changes half-way, and what does it risk?

    .venv/bin/python scripts/bench_tuned_drift.py --out out/tuned_drift.jsonl --seeds 5
    .venv/bin/python scripts/bench_tuned_drift.py --out out/tuned_drift.jsonl --variants tuned-bad --seeds 1
    .venv/bin/python scripts/bench_tuned_drift.py --out out/tuned_drift.jsonl --table

A simulated production (`tuning.tuned_world`): the production scheduler on simulated engines, and beside it
the very loop that tunes live schedulers, with its searches in the twin, its slices, roll-backs and pauses.
The share of short requests changes half-way at once (`--shares`), and the rate with it, so that the load
stays what it is called: 1.0 is the rate at which the same replicas finish a backlog of the mix, first come
first served. The file is appended to; runs that are in it already are not repeated.

Variants: `fixed` keeps the values it starts with, `tuned` tunes them; `good` starts from the product's
defaults, `bad` from those of `bench_tuner.py` (an engine queue so long that no order matters, and urgency
that turns every order into that of arrival).

Tuners (`--tuner`): `usual` is the product's default; `quick` tries a step in at most twelve minutes and
searches on half as much, so that an hour and a half shows several steps; `naive` is `quick` with a guard that
takes back every step that looks worse than the margin and adopts every one that looks better.

Phases, in shares of the time: `first` 0 to 1/8; `before` 1/4 to 1/2, where the mix flips; `flip` 1/2 to 5/8;
`after` 3/4 to 1. Columns (means over seeds, ± half the 95 % interval of Student's t):

    TTFT        p50 / p99 of the requests that arrived in the phase, by class, in seconds
    reward      of the phase (`tuning.slo_reward`)
    vs fixed    reward less that of the fixed values with the same start and seed (paired)
    tried       candidates that were tried in slices; adopted, rolled back; and searches without a winner
    worst pair  of slices: reward under the candidate less that under the incumbent beside it, lowest of all

What it cannot show: how well the engine model fits real engines. Here the twin's is that of production,
unless `--twin-profile` names another one, which it then has to make do with.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_tuner import STARTS

from serve_app.command import positive_float, positive_int
from serve_app.errors import ServeAppError
from serve_app.metrics.confidence import interval_95, paired_difference_95
from serve_app.metrics.record import RequestRecord
from serve_app.provenance import commit, hardware
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.load import saturated_rate_of
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import Disclosure, fit, requests_of
from serve_app.tuning import LearnedPartitions, StrategicSettings
from serve_app.tuning.objective.objective import ObjectiveSettings, reward_of
from serve_app.tuning.online.parameter_search import ParameterTuningSettings
from serve_app.tuning.online.rollout_settings import Act, Audit, RolloutSettings
from serve_app.tuning.online.tuned_simulation import TunedSimulation, counting_replay, counting_search
from serve_app.tuning.search.study_settings import StudySettings
from serve_app.tuning.search.tunable import Tunable, parameters_of, started_from
from serve_app.tuning.twin.digital_twin import TwinSettings
from serve_app.workloads.lengths import LognormalLengths, MixedLengths, UniformLengths
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import Trace, TraceRequest

Row = dict[str, Any]
VARIANTS = ("fixed-good", "fixed-bad", "tuned-good", "tuned-bad")
PHASES = {"first": (0.0, 0.125), "before": (0.25, 0.5), "flip": (0.5, 0.625), "after": (0.75, 1.0)}
_SHORT, _LONG = UniformLengths(32, 256), UniformLengths(1024, 4096)
_ANSWERS = LognormalLengths(mean=100, cv=0.5, max_tokens=512)
_BACKLOG = 4_000
# How the tuner is set. `quick` tries a step in twelve minutes and searches on half of what the product's
# defaults (`usual`) search on, so that an hour and a half shows several steps.
_QUICK = ParameterTuningSettings(
    profile="laptop",
    every_s=240.0,
    min_requests=400,
    search_cpu_s=12.0,
    core_share=0.5,
    twin=TwinSettings(window_requests=300),
    study=StudySettings(rungs=(1, 2, 4), confirm_windows=8),
    rollout=RolloutSettings(mode="on", max_step=0.5, pairs=6, cool_down_s=60.0, failure_cool_down_s=240.0),
)
_USUAL = ParameterTuningSettings(profile="laptop", rollout=RolloutSettings(mode="on"))
# A guard that knows nothing of what traffic does by itself.
_NAIVE = replace(_QUICK, rollout=replace(_QUICK.rollout, noise_allowance=0.0, false_adoption=1.0))
TUNERS = {"quick": _QUICK, "usual": _USUAL, "naive": _NAIVE}


def main() -> int:
    """Play what is not in the file yet, and print the tables."""
    args = arguments()
    try:
        if not args.table:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            for row in rows(args, read(args.out)):
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, allow_nan=False) + "\n")
    except (ServeAppError, ValueError) as exc:
        print(f"bench_tuned_drift: {exc}", file=sys.stderr)
        return 2
    print(tables(read(args.out)))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each run")
    parser.add_argument("--table", action="store_true", help="print the tables of an existing file")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="(all)")
    parser.add_argument("--tuner", choices=TUNERS, default="quick", help="(%(default)s)")
    parser.add_argument("--seeds", type=positive_int, default=5, help="(%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--minutes", type=positive_float, default=90.0, help="simulated (%(default)s)")
    parser.add_argument("--shares", type=float, nargs=2, default=(0.8, 0.3), help="short (%(default)s)")
    parser.add_argument("--load", type=positive_float, default=0.95, help="(%(default)s)")
    parser.add_argument("--profile", default="llama2-70b-h100-tp4", help="(%(default)s)")
    parser.add_argument("--twin-profile", help="the twin's, when it is to be wrong (that of production)")
    parser.add_argument("--replicas", type=positive_int, default=1, help="(%(default)s)")
    parser.add_argument(
        "--pace",
        type=positive_float,
        default=2_000.0,
        help="requests that the twin plays in a CPU second (%(default)s)",
    )
    return parser.parse_args()


def read(path: Path) -> list[Row]:
    """The runs in the file; none when there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows(args: argparse.Namespace, known: Sequence[Row]) -> Iterator[Row]:
    """One row for each run that is not known."""
    conditions = {
        name: getattr(args, name)
        for name in ("tuner", "minutes", "shares", "load", "profile", "replicas", "pace")
    }
    conditions["shares"] = list(args.shares)
    if args.twin_profile:
        conditions["twin_profile"] = args.twin_profile
    alike = [each for each in known if each["conditions"] == conditions]
    done = {(each["variant"], each["seed"]) for each in alike}
    fleet = FleetSettings(profile=args.profile, replicas={"all": args.replicas})
    rates: list[float] = alike[0]["rates_per_s"] if alike else []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for variant in args.variants:
            if (variant, seed) in done:
                continue
            rates = rates or [args.load * saturated_rate_of(fleet, backlog(share)) for share in args.shares]
            began = time.monotonic()
            trace = flipping(args, rates, seed)
            row = {"variant": variant, "seed": seed, "conditions": conditions, "rates_per_s": rates}
            row |= play(args, fleet, trace, variant)
            row |= {"commit": commit(), "hardware": hardware(), "wall_s": time.monotonic() - began}
            print(f"{variant} seed {seed}: {row['wall_s']:.0f} s", file=sys.stderr)
            yield row


def lengths(share: float, count: int, seed: int, name: str) -> list[tuple[int, int]]:
    """Prompts and answers of a mix, in tokens."""
    kinds = MixedLengths(((share, _SHORT), (1.0 - share, _LONG)))
    prompts = kinds.sample(count, stream(seed, f"{name} prompts"))
    answers = _ANSWERS.sample(count, stream(seed, f"{name} answers"))
    return [(int(prompt), int(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def backlog(share: float) -> Trace:
    """Requests of a mix, to see how fast they can be served."""
    requests = [
        TraceRequest(arrival_s=float(place), prompt_tokens=prompt, output_tokens=answer)
        for place, (prompt, answer) in enumerate(lengths(share, _BACKLOG, 0, "backlog"))
    ]
    return Trace(name="backlog", source=f"{share:.0%} short", requests=tuple(requests))


def flipping(args: argparse.Namespace, rates: Sequence[float], seed: int) -> Trace:
    """A Poisson stream whose mix and rate change half-way."""
    requests: list[TraceRequest] = []
    half_s = 60.0 * args.minutes / 2
    for half, (share, rate) in enumerate(zip(args.shares, rates, strict=True)):
        gaps = stream(seed, f"gaps {half}").exponential(1.0 / rate, round(2 * rate * half_s) + 100)
        times = [float(at) for at in gaps.cumsum() if at < half_s]
        requests += [
            TraceRequest(arrival_s=half * half_s + at, prompt_tokens=prompt, output_tokens=answer)
            for at, (prompt, answer) in zip(
                times, lengths(share, len(times), seed, f"half {half}"), strict=True
            )
        ]
    return Trace(name="flip", source=f"seed {seed}", requests=tuple(requests))


def play(args: argparse.Namespace, fleet: FleetSettings, trace: Trace, variant: str) -> Row:
    """One run, in figures."""
    kind, start = variant.split("-")
    tuning = replace(TUNERS[args.tuner], profile=args.twin_profile or args.profile)
    if kind == "fixed":
        tuning = replace(tuning, rollout=replace(tuning.rollout, mode="off"))
    configured = scheduler_settings("ewsjf", fleet.routing, {})
    configured = started_from(
        Tunable(scheduler=configured), parameters_of(configured), STARTS[start]
    ).scheduler
    plans = fleet.plans(isolated=True)
    world = TunedSimulation(
        configured,
        plans,
        tuning,
        counting_search(tuning, args.pace),
        learner=LearnedPartitions(StrategicSettings()).learner(),
        replayer=counting_replay(args.pace),
    )
    fitted = fit(trace, max(plan.engine.max_model_len for plan in plans)).trace
    records = world.run(list(requests_of(fitted, Disclosure(), plans[0].engine.block_size)))
    audit = world.loop.rollout.audit
    seconds = 60.0 * args.minutes
    return {
        "requests": len(records),
        "phases": {
            name: figures(records, begin * seconds, end * seconds) for name, (begin, end) in PHASES.items()
        },
        "searches": world.searches,
        "studies": world.loop.document()["studies"],
        "pairs": pairs(audit),
        "audit": [each.as_json() for each in audit],
        "last_values": dict(world.loop.rollout.incumbent),
        "settings": {"tuning": asdict(tuning)},
    }


def figures(records: Sequence[RequestRecord], begin: float, end: float) -> Row:
    """How those were served that arrived in a stretch of time."""
    reward = reward_of(
        [record for record in records if begin <= record.arrived_at < end], ObjectiveSettings()
    )
    return reward.as_json()


def pairs(audit: Sequence[Audit]) -> list[float]:
    """Of each pair of slices, the reward under the candidate less that under the incumbent."""
    found: list[float] = []
    slices: dict[int, float] = {}
    for each in audit:
        if each.act is Act.STARTED:
            slices = {}
        if each.act is Act.JUDGED and "reward" in each.figures:
            number = int(each.figures["slice"])
            slices[number] = each.figures["reward"]
            other = slices.get(number ^ 1)
            if other is not None:
                sign = 1 if number % 4 in (1, 2) else -1
                found.append(sign * (slices[number] - other))
    return found


def tables(found: Sequence[Row]) -> str:
    """For each set of conditions, how requests were served by phase, and what the tuner did."""
    groups: dict[str, list[Row]] = {}
    for row in found:
        groups.setdefault(json.dumps(row["conditions"]), []).append(row)
    texts = []
    for conditions, group in groups.items():
        rates = " and ".join(f"{rate:.2f}" for rate in group[0]["rates_per_s"])
        texts.append(f"{conditions}, {rates} requests/s\n\n{served(group)}\n\n{tuned(group)}")
    return "\n\n".join(texts)


def served(group: Sequence[Row]) -> str:
    """A line for each phase and variant."""
    classes = sorted({name for row in group for name in row["phases"]["before"]["classes"]}, reverse=True)
    head = ["phase", "variant", "n", *(f"TTFT {name.removeprefix('default ')}" for name in classes)]
    lines = [[*head, "reward", "vs fixed"]]
    for phase in PHASES:
        for variant in VARIANTS:
            runs = {row["seed"]: row["phases"][phase] for row in group if row["variant"] == variant}
            if not runs:
                continue
            cells = [percentiles([run["classes"][name] for run in runs.values()]) for name in classes]
            rewards = [run["value"] for run in runs.values()]
            lines.append(
                [phase, variant, str(len(runs)), *cells, written(rewards), against(group, phase, variant)]
            )
    return markdown(lines)


def percentiles(found: Sequence[Row]) -> str:
    """Means over seeds of p50 and p99."""
    p50 = statistics.fmean(each["ttft_p50_s"] for each in found)
    return f"{p50:.2f} / {written([each['ttft_p99_s'] for each in found], 2)}"


def against(group: Sequence[Row], phase: str, variant: str) -> str:
    """The reward less that of the fixed values with the same start."""
    kind, start = variant.split("-")
    if kind == "fixed":
        return ""
    mine, fixed = (
        {row["seed"]: row["phases"][phase]["value"] for row in group if row["variant"] == f"{name}-{start}"}
        for name in ("tuned", "fixed")
    )
    seeds = sorted(mine.keys() & fixed.keys())
    if not seeds:
        return ""
    difference = paired_difference_95([mine[seed] for seed in seeds], [fixed[seed] for seed in seeds])
    half = "" if difference.high is None else f" ± {difference.high - difference.mean:.4f}"
    return f"{difference.mean:+.4f}{half}"


def tuned(group: Sequence[Row]) -> str:
    """A line for each tuned variant: means over seeds."""
    lines = [
        [
            "variant",
            "n",
            "searches",
            "without winner",
            "tried",
            "adopted",
            "rolled back",
            "pairs",
            "worst pair",
        ]
    ]
    for variant in VARIANTS:
        runs = [row for row in group if row["variant"] == variant]
        if not runs or variant.startswith("fixed"):
            continue
        counts = [[each["act"] for each in row["audit"]] for row in runs]
        acts = [
            f"{statistics.fmean(one.count(act.value) for one in counts):.1f}"
            for act in (Act.STARTED, Act.ADOPTED, Act.ROLLED_BACK)
        ]
        none = [sum(not study["confident"] for study in row["studies"]) for row in runs]
        of_pairs = [pair for row in runs for pair in row["pairs"]]
        searches = statistics.fmean(row["searches"] for row in runs)
        worst = f"{min(of_pairs):+.4f}" if of_pairs else "-"
        lines.append(
            [
                *(variant, str(len(runs)), f"{searches:.1f}", f"{statistics.fmean(none):.1f}"),
                *(*acts, str(len(of_pairs)), worst),
            ]
        )
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line is its head."""
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|---" * len(lines[0]) + "|", *text[1:]])


def written(values: Sequence[float], decimals: int = 4) -> str:
    """Mean ± half the interval."""
    interval = interval_95(values)
    mean = f"{interval.mean:.{decimals}f}"
    return mean if interval.high is None else f"{mean} ± {interval.high - interval.mean:.{decimals}f}"


if __name__ == "__main__":
    sys.exit(main())
