#!/usr/bin/env python
"""What does the scheduler itself cost per request, and does a larger fleet make it dearer?

    .venv/bin/python scripts/bench_dispatch.py
    .venv/bin/python scripts/bench_dispatch.py --replicas 10 1000 --deciders "ewsjf, affinity" --collector
    .venv/bin/python scripts/bench_dispatch.py --json out/dispatch.json

Drives the pure scheduler, with production settings, through the events of each request: it arrives, is
dispatched, sends its first token, finishes. Between them every replica reports, five times a second of the
fleet's time. Half of the replicas are a short pool, half a long one, each with half of the work. Requests are
conversations that come at the rate that takes `--taken` of all places; the queues of EWSJF are learned from
their lengths. Each fleet is played until it is full, and then in windows, all fleets and deciders by turns.

Rows: both policies, with replicas chosen by load alone and with prefix affinity; and, in the same windows,
three baselines that only choose a replica and count: `round robin`, `power of two`, and `scan`, which looks
at every replica for the one with the fewest requests. The scheduler's own choice is no power of two: it
finds the freest replica that fits from heaps.

Columns, microseconds of one core:

    submit       arrival: checks, estimate, pools, prediction of the wait, entry into the queue. p50 / p99
    dispatch     the order of service, the choice of the replica, and all books of it
    first token, finish     as they say
    report       one report of one replica
    request      submit + dispatch + first token + finish, each at the median of a window, which work of
                 others on the same core hardly moves; with the 95 % interval of Student's t over the windows
    of smallest  `request` over that of the smallest fleet in the same window, with the interval: 1 is flat
    taken        share of places taken

A call of the clock costs some 0.05 to 0.2 us, which is in each figure. Percentiles are over all windows
together. Times are of the wall clock, which is finer than that of the processor; `busy` says how much of it
this process had the core. Python's cyclic garbage collector rests during the windows, and collects between
them; with `--collector` it works as usual, and what exists before the windows is not frozen.

What it cannot show: sockets and messages (`bench_channel.py`), and a queue: at this load hardly anybody
waits. A larger fleet also has more requests in memory, which caches hold less well; the baselines show a part
of the rise that comes of that.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from dispatch_fleet import (
    KINDS,
    Baseline,
    Decider,
    Drive,
    FleetTraffic,
    Production,
    Window,
    least_loaded,
    power_of_two,
    round_robin,
    traffic,
)

from serve_app.command import positive_float, positive_int, progress_bar, write_json
from serve_app.metrics.confidence import ConfidenceInterval, interval_95
from serve_app.metrics.statistics import Distribution
from serve_app.provenance import commit, hardware, load_average
from serve_app.tuning import RefineAndPruneSettings, refine_and_prune

# A fleet is full after some times the mean service time; few replicas take longer to fill their caches.
_FILL_TURNS = 2.5
_LEAST_FILL_REQUESTS = 4_000

Make = Callable[[FleetTraffic], Decider]


def production(policy: str, fleet: FleetTraffic, *, affinity: bool) -> Decider:
    """The scheduler, with queues learned from the fleet's own traffic."""
    lengths = np.array([job.request.shape.prompt_tokens for job in fleet.jobs[:10_000]])
    partition = refine_and_prune(lengths, RefineAndPruneSettings())
    return Production(policy, fleet, partition, affinity=affinity)


DECIDERS: Mapping[str, Make] = {
    "ewsjf, affinity": partial(production, "ewsjf", affinity=True),
    "ewsjf, by load": partial(production, "ewsjf", affinity=False),
    "fcfs, affinity": partial(production, "fcfs", affinity=True),
    "fcfs, by load": partial(production, "fcfs", affinity=False),
    "round robin": partial(Baseline, round_robin),
    "power of two": partial(Baseline, power_of_two),
    "scan": partial(Baseline, least_loaded),
}


@dataclass(slots=True)
class Cell:
    """One decider with one fleet: how far it has come, and its windows."""

    decider: str
    replicas: int
    drive: Drive
    windows: list[Window] = field(default_factory=list)


def main() -> int:
    """Measure, print, write."""
    args = arguments()
    cells = measured(args)
    rows = [row_of(cell, cells) for cell in cells]
    print(table(rows))
    print(f"\nbusy {min(row['busy'] for row in rows):.2f} at least, load average {load_average()}")
    if args.json is not None:
        provenance = {
            "commit": commit(),
            "settings": {name: str(value) for name, value in vars(args).items()},
            "hardware": hardware(),
            "load_average": load_average(),
        }
        write_json(args.json, {"rows": rows, "provenance": provenance})
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=positive_int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument(
        "--deciders", nargs="+", choices=tuple(DECIDERS), default=list(DECIDERS), metavar="NAME"
    )
    parser.add_argument(
        "--places", type=positive_int, default=16, help="sequences of each replica (%(default)s)"
    )
    parser.add_argument(
        "--taken", type=positive_float, default=0.8, help="share of places taken (%(default)s)"
    )
    parser.add_argument("--requests", type=positive_int, default=1_000, help="in each window (%(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=10, help="windows (%(default)s)")
    parser.add_argument("--report-interval", type=positive_float, default=0.2, help="s (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (%(default)s)")
    parser.add_argument("--collector", action="store_true", help="let the garbage collector work")
    parser.add_argument("--json", type=Path, help="write the rows, with provenance")
    return parser.parse_args()


def measured(args: argparse.Namespace) -> list[Cell]:
    """All fleets, filled, then played in windows by turns."""
    replicas = sorted(set(args.replicas))
    cells: list[Cell] = []
    with progress_bar("fleets filled", len(replicas) * len(args.deciders)) as advance:
        for count in replicas:
            fill = max(_LEAST_FILL_REQUESTS, round(_FILL_TURNS * args.taken * args.places * count))
            fleet = traffic(
                count,
                args.places,
                args.taken,
                fill + args.repeats * args.requests + 1,
                report_interval_s=args.report_interval,
                seed=args.seed,
            )
            for name in args.deciders:
                cell = Cell(name, count, Drive(DECIDERS[name](fleet), fleet))
                cell.drive.play(fill)
                cells.append(cell)
                advance()
    with progress_bar("windows", args.repeats * len(cells)) as advance:
        play_windows(cells, args, advance)
    return cells


def play_windows(cells: list[Cell], args: argparse.Namespace, advance: Callable[[], object]) -> None:
    """One window of each, then the next of each."""
    gc.collect()
    if not args.collector:
        # What exists by now is never looked at again, so that collecting between windows is quick.
        gc.freeze()
        gc.disable()
    try:
        for _repeat in range(args.repeats):
            for cell in cells:
                if not args.collector:
                    gc.collect()
                cell.windows.append(cell.drive.play(args.requests))
                advance()
    finally:
        gc.enable()
        gc.unfreeze()


def row_of(cell: Cell, cells: list[Cell]) -> dict[str, Any]:
    """The figures of one cell."""
    smallest = next(one for one in cells if one.decider == cell.decider)
    requests_us = [window.per_request_us() for window in cell.windows]
    growth = [
        mine / window.per_request_us() for mine, window in zip(requests_us, smallest.windows, strict=True)
    ]
    return {
        "decider": cell.decider,
        "replicas": cell.replicas,
        "events_us": {
            kind: Distribution.of(
                cost / 1_000 for cost in chain(*(window.costs_ns[kind] for window in cell.windows))
            ).as_json()
            for kind in KINDS
        },
        "request_us": interval_95(requests_us).as_json(),
        "of_smallest": interval_95(growth).as_json(),
        "submitted": sum(window.submitted for window in cell.windows),
        "dispatched": sum(window.dispatched for window in cell.windows),
        "taken": fmean(window.taken for window in cell.windows),
        "busy": min(window.busy for window in cell.windows),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, in the order of deciders and fleets."""
    lines = [
        f"| decider | replicas | {' | '.join(KINDS)} | request | of smallest | taken |",
        "|---" * (len(KINDS) + 5) + "|",
    ]
    for row in sorted(rows, key=lambda row: (list(DECIDERS).index(row["decider"]), row["replicas"])):
        events = [f"{one['p50']:.1f} / {one['p99']:.0f}" for one in row["events_us"].values()]
        cells = [
            row["decider"],
            f"{row['replicas']:,}",
            *events,
            plus_minus(ConfidenceInterval(**row["request_us"]), 1),
            plus_minus(ConfidenceInterval(**row["of_smallest"]), 2),
            f"{row['taken']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plus_minus(interval: ConfidenceInterval, decimals: int) -> str:
    """The mean, and half the width of its interval."""
    if interval.high is None:
        return f"{interval.mean:.{decimals}f}"
    return f"{interval.mean:.{decimals}f} +- {interval.high - interval.mean:.{decimals}f}"


if __name__ == "__main__":
    sys.exit(main())
