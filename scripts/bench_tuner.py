#!/usr/bin/env python
"""How fast does the tuner find better settings, how good are they, and what does it cost meanwhile?

    .venv/bin/python scripts/bench_tuner.py --out out/tuner.jsonl
    .venv/bin/python scripts/bench_tuner.py --out out/tuner.jsonl --table
    .venv/bin/python scripts/bench_tuner.py --out out/tuner.jsonl --seeds 1 --seconds 20 --workloads paper-mix

Each workload is tuned from a bad start and from the product's defaults, with every seed, by

    tpe, random    the study of `python -m serve_app tune` in the digital twin, for `--seconds`, without the
                   defaults among its candidates (from a bad start they would end the race before it begins)
    live           the paper's loop, simulated: TPE on production itself, one trial of `--trial-s` seconds of
                   traffic after the other, each on the traffic that then comes; the best reward seen leads

Whatever leads at a time is judged on windows of other traffic of the same kind, the same for all methods, by
the reward that it has there less that of the start. Columns (means over seeds, with half the width of the
95 % interval of Student's t where there are several):

    gain            of the settings that lead at the end
    share           of the best gain that any method found for that workload, start and seed, %
    to 95 %         seconds until what leads has 95 % of that best gain: of searching in the twin, of live
                    traffic for `live`; of how many seeds it ever got there
    confident       how many studies recommend what they found (twin only)
    trials          candidates tried
    requests        simulated, by the search itself
    worst trial     reward of the worst candidate that production was exposed to, less that of the start; what
                    is searched in the twin exposes it to none

The file has one line for each search, with its whole course: reward of what led against trials and seconds.

What it cannot show: how well the twin's engine model fits real engines; how a guarded roll-out goes.
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

from serve_app.command import positive_float, positive_int
from serve_app.errors import ServeAppError
from serve_app.metrics.confidence import interval_95
from serve_app.provenance import commit, hardware, load_average
from serve_app.scheduling import SchedulerSettings
from serve_app.simulation.fleet import FleetSettings
from serve_app.simulation.load import saturated_rate_per_s
from serve_app.simulation.run import RunSettings, fitted_trace
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.workload import TraceChoice
from serve_app.tuning.objective.objective import ObjectiveSettings
from serve_app.tuning.search.optimiser import make_optimiser
from serve_app.tuning.search.scoreboard import INCUMBENT, Job
from serve_app.tuning.search.search_space import Values
from serve_app.tuning.search.study import Study
from serve_app.tuning.search.study_run import Budget, run_study
from serve_app.tuning.search.study_settings import StudySettings
from serve_app.tuning.search.tunable import Tunable, parameters_of, space_of, started_from
from serve_app.tuning.twin.digital_twin import TwinPlan, TwinSettings
from serve_app.tuning.twin.processes import TwinProcesses

Row = dict[str, Any]
WORKLOADS = {"paper-mix": "paper-mix", "azure": "azure-code+azure-conv"}
STARTS: dict[str, dict[str, object]] = {
    "good": {},
    # An engine queue so long that no order matters, and urgency that turns every order into that of arrival.
    "bad": {
        "a_u": 0.01,
        "b_u": 5.0,
        "max_long_prefills": 8,
        "max_longest_prefills": 8,
        "short_work_share": 0.6,
        "target_waiting": 16,
    },
}
METHODS = ("tpe", "random", "live")
_JUDGES_SEED = 90_001
"""Traffic on which all are judged; no search has this seed."""


def main() -> int:
    """Search what is asked for, and print the table."""
    args = arguments()
    if args.cpu_clock and args.jobs > 1:
        print("bench_tuner: --cpu-clock counts one process alone: add --jobs 1", file=sys.stderr)
        return 2
    try:
        if not args.table:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("w", encoding="utf-8") as file:
                for row in rows(args):
                    file.write(json.dumps(row, allow_nan=False) + "\n")
                    file.flush()
    except (ServeAppError, ValueError) as exc:
        print(f"bench_tuner: {exc}", file=sys.stderr)
        return 2
    lines = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
    print(table([line for line in lines if "provenance" not in line]))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each search")
    parser.add_argument("--table", action="store_true", help="print the table of an existing file")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="(%(default)s)")
    parser.add_argument("--starts", default=",".join(STARTS), help="(%(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="(%(default)s)")
    parser.add_argument("--objective", choices=("slo", "paper"), default="slo", help="(%(default)s)")
    parser.add_argument("--profile", default="llama2-70b-h100-tp4", help="(%(default)s)")
    parser.add_argument("--replicas", type=positive_int, default=4, help="(%(default)s)")
    parser.add_argument("--load", type=positive_float, default=1.0, help="(%(default)s)")
    parser.add_argument("--seeds", type=positive_int, default=10, help="(%(default)s)")
    parser.add_argument("--seconds", type=positive_float, default=60.0, help="of each study (%(default)s)")
    parser.add_argument("--trials", type=positive_int, default=200, help="at most (%(default)s)")
    parser.add_argument("--requests", type=positive_int, default=5_000, help="of traffic (%(default)s)")
    parser.add_argument("--window", type=positive_int, default=600, help="requests (%(default)s)")
    parser.add_argument("--judges", type=positive_int, default=12, help="windows to judge by (%(default)s)")
    parser.add_argument("--live-trials", type=positive_int, default=12, help="(%(default)s)")
    parser.add_argument("--trial-s", type=positive_float, default=600.0, help="live (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--cpu-clock",
        action="store_true",
        help="seconds are CPU seconds of this one process: for a machine that others use as well",
    )
    return parser.parse_args()


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """One row for each search, after one with provenance."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    yield {
        "provenance": {
            "commit": commit(),
            "settings": given,
            "starts": STARTS,
            "hardware": hardware(),
            "load_average": load_average(),
        }
    }
    for workload in args.workloads.split(","):
        for start in args.starts.split(","):
            for seed in range(args.seeds):
                yield from searches(args, workload, start, seed)


def searches(args: argparse.Namespace, workload: str, start: str, seed: int) -> Iterator[Row]:
    """All methods on one workload, start and seed; judged together, since the best of all is the measure."""
    plan = plan_of(args, workload, start, seed)
    found = []
    for method in args.methods.split(","):
        began = time.monotonic()
        row = live(args, plan, seed) if method == "live" else twin(args, plan, method, seed)
        row |= {"workload": workload, "start": start, "seed": seed, "method": method}
        found.append(row | {"wall_s": time.monotonic() - began})
    judge(args, plan_of(args, workload, start, _JUDGES_SEED + seed), found)
    best = max((point["gain"] for row in found for point in row["course"]), default=0.0)
    for row in found:
        reached = [p["seconds"] for p in row["course"] if best > 0 and p["gain"] >= 0.95 * best]
        yield row | {"best_gain": best, "to_95_s": min(reached, default=None)}
        print(f"{workload} {start} seed {seed} {row['method']}: gain {row['gain']:+.4f}", file=sys.stderr)


def plan_of(args: argparse.Namespace, workload: str, start: str, seed: int) -> TwinPlan:
    """The twin of a workload, started as named."""
    fleet = FleetSettings(profile=args.profile, replicas={"all": args.replicas})
    settings: SchedulerSettings = scheduler_settings("ewsjf", fleet.routing, {})
    tunable = started_from(Tunable(scheduler=settings), parameters_of(settings), STARTS[start])
    choice = TraceChoice(name=WORKLOADS[workload], requests=args.requests)
    # One rate for all seeds, or a seed with a light trace would be played at another load.
    rate = args.load * saturated_rate_per_s(fleet, choice, 0)
    run = RunSettings(policy="ewsjf", fleet=fleet, trace=choice, seed=seed, rate_per_s=rate)
    return TwinPlan(
        tunable=tunable,
        space=space_of(tunable),
        engines=tuple(fleet.plans(isolated=True)),
        traffic=fitted_trace(run).trace,
        objective=ObjectiveSettings(kind=args.objective),
        settings=TwinSettings(seed=seed, window_requests=args.window),
    )


def twin(args: argparse.Namespace, plan: TwinPlan, method: str, seed: int) -> Row:
    """A study in the digital twin."""
    settings = StudySettings(trials=args.trials)
    optimiser = make_optimiser(method, plan.space, seed=seed)
    study = Study(optimiser, settings, independent_windows=plan.independent_windows)
    with TwinProcesses(plan, jobs=args.jobs) as processes:
        # Starting the processes is part of the user's time, so the clock runs already.
        clock = time.process_time if args.cpu_clock else time.monotonic
        budget = Budget(clock=clock, seconds=args.seconds)
        course = run_study(study, settings, processes, budget)
    assert study.finding is not None
    return {
        "trials": len(study.board),
        "requests": course.requests,
        "confident": study.finding.confident,
        "worst_trial": 0.0,
        "course": [
            asdict(step) | {"values": dict(study.board.candidates[step.leader].values)}
            for step in course.steps
        ],
    }


def live(args: argparse.Namespace, plan: TwinPlan, seed: int) -> Row:
    """The paper's loop: each trial on the traffic of its own ten minutes, with nothing to compare it with."""
    assert plan.traffic.rate_per_s is not None
    window = max(1, round(args.trial_s * plan.traffic.rate_per_s))
    production = replace(plan, settings=replace(plan.settings, window_requests=window, warm_up_ratio=0.0))
    optimiser = make_optimiser("tpe", plan.space, seed=seed)
    course: list[Row] = []
    seen: list[tuple[float, Values]] = []
    requests = 0
    with TwinProcesses(production) as processes:
        for trial in range(args.live_trials):
            proposal = optimiser.ask()
            ((_, played),) = processes.play([Job(proposal.number, 10_000 + trial, proposal.values)])
            requests += played.requests
            optimiser.tell(proposal, played.reward.value)
            if played.reward.value is not None:
                seen.append((played.reward.value, proposal.values))
            leader = max(seen, key=lambda each: each[0])[1] if seen else plan.space.current
            course.append(
                {"seconds": (trial + 1) * args.trial_s, "trials": trial + 1, "values": dict(leader)}
            )
    first = seen[0][0] if seen else 0.0
    return {
        "trials": args.live_trials,
        "requests": requests,
        "confident": None,
        "worst_trial": min((reward - first for reward, _ in seen), default=0.0),
        "course": course,
    }


def judge(args: argparse.Namespace, plan: TwinPlan, found: list[Row]) -> None:
    """Write into every point of every course what its leader gains on the judges' windows."""
    leaders = [plan.space.current]
    for row in found:
        leaders += [point["values"] for point in row["course"] if point["values"] not in leaders]
    jobs = [
        Job(number, window, values) for number, values in enumerate(leaders) for window in range(args.judges)
    ]
    rewards: dict[int, list[float]] = {}
    with TwinProcesses(plan, jobs=args.jobs) as processes:
        for job, played in processes.play(jobs):
            rewards.setdefault(job.candidate, []).append(played.reward.value or 0.0)
    start = statistics.fmean(rewards[INCUMBENT])
    for row in found:
        for point in row["course"]:
            point["gain"] = statistics.fmean(rewards[leaders.index(point["values"])]) - start
        row["start_reward"] = start
        row["gain"] = row["course"][-1]["gain"] if row["course"] else 0.0


def table(found: Sequence[Row]) -> str:
    """Means over seeds, one line for each workload, start and method."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row["workload"], row["start"], row["method"]), []).append(row)
    head = ("workload", "start", "method", "n", "gain", "share %", "to 95 % s", "confident")
    lines = [[*head, "trials", "requests", "worst trial"]]
    for key, group in groups.items():
        lines.append([*key, str(len(group)), *cells(group)])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *text[1:]])


def cells(group: Sequence[Row]) -> list[str]:
    """The figures of one line."""
    shares = [100 * row["gain"] / row["best_gain"] for row in group if row["best_gain"] > 0]
    reached = [row["to_95_s"] for row in group if row["to_95_s"] is not None]
    confident = [row["confident"] for row in group if row["confident"] is not None]
    times = f"{statistics.median(reached):,.0f} ({len(reached)}/{len(group)})" if reached else "-"
    return [
        written([row["gain"] for row in group], 4),
        written(shares, 0) if shares else "-",
        times,
        f"{sum(confident)}/{len(confident)}" if confident else "-",
        f"{statistics.fmean(row['trials'] for row in group):,.0f}",
        f"{statistics.fmean(row['requests'] for row in group):,.0f}",
        written([row["worst_trial"] for row in group], 4),
    ]


def written(values: Sequence[float], decimals: int) -> str:
    """A mean, with half of its interval when there are several."""
    found = interval_95(values)
    mean = f"{found.mean:+.{decimals}f}"
    return mean if found.high is None else f"{mean} ± {found.high - found.mean:.{decimals}f}"


if __name__ == "__main__":
    sys.exit(main())
