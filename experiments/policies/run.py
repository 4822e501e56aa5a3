#!/usr/bin/env python
"""Which policy serves short prompts soonest, and what does it cost the long ones? A whole table, simulated.

    .venv/bin/python scripts/bench_policies.py --out out/policies.jsonl
    .venv/bin/python scripts/bench_policies.py --out out/policies.jsonl --table
    .venv/bin/python scripts/bench_policies.py --out out/r.jsonl --experiment FILE.yaml

Plays every policy of the experiment at every load, on every trace and profile, with every seed, in several
processes. The file's first line tells commit, experiment and machine; each further line is a run with all of
its settings. `--table` runs nothing and reads the file; `--resume` plays only what an interrupted run left.

Columns (means over n seeds, with half the width of the 95 % interval of Student's t):

    short, long     by prompt length alone, at the case's border. TTFT counts from arrival
    longest wait    of any request, in the gateway's queue; a policy that starves somebody shows it here
    TPOT            mean time per output token, over all requests
    goodput         requests per second within the SLO: TTFT 1 s short, 10 s long, TPOT 100 ms
    tokens/s        prompt and output tokens over the whole run, from the first arrival to the last answer

Load 1.0 is the rate at which the same replicas finish the same requests under FCFS when they never run out
of work; all policies of a case and seed meet the same requests at the same times, and complete them all. The
first tenth of requests is not measured.

What it cannot show: how well the engine model fits a real engine (that is `calibrate`), clients that give up,
and what the control plane costs in CPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from experiments.policies.grid import (
    Experiment,
    Place,
    load_experiment,
    only,
    planned,
    without_unknown_policies,
)
from serve_app.command import positive_int, progress_bar
from serve_app.errors import ServeAppError
from serve_app.provenance import commit, hardware, load_average
from serve_app.simulation.batch import run_all
from serve_app.simulation.command.results import markdown_table, run_as_json, unequal_work
from serve_app.simulation.partitions import LEARNED, PartitionSource, partition_source
from serve_app.simulation.run import RunSettings
from serve_app.tuning import LearnedPartitions

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_EXPERIMENT = ROOT / "configs" / "experiments" / "policies.yaml"

Row = dict[str, Any]


def main() -> int:
    """Play what is asked for and print the tables."""
    args = arguments()
    try:
        if not args.table:
            run(args)
    except (ServeAppError, ValueError) as exc:
        print(f"bench_policies: {exc}", file=sys.stderr)
        return 2
    rows = read_rows(args.out)
    print(tables(rows))
    for line in unequal_work(rows):
        print(f"not the same work: {line}", file=sys.stderr)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", type=Path, default=DEFAULT_EXPERIMENT, help="(%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each run")
    parser.add_argument("--table", action="store_true", help="print the table of an existing file")
    parser.add_argument("--resume", action="store_true", help="keep what the file has, add what is missing")
    parser.add_argument("--variants", default="", help="only these, with commas between")
    parser.add_argument("--cases", default="", help="only these, with commas between")
    parser.add_argument("--seeds", type=positive_int, help="instead of the experiment's")
    parser.add_argument("--requests", type=positive_int, help="in each run, instead of the experiment's")
    parser.add_argument(
        "--partition",
        default=LEARNED,
        help="length queues where a variant names none: learned, prior or a YAML file (%(default)s)",
    )
    parser.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (%(default)s)"
    )
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Play every run that the file does not have yet, and append it."""
    experiment = asked_for(args)
    there = kept(args.out) if args.resume and args.out.exists() else []
    have = {place_of(row) for row in there if "provenance" not in row}

    def partition_of(wanted: str) -> PartitionSource | None:
        return partition_source(wanted or args.partition, LearnedPartitions())

    plan = planned(experiment, jobs=args.jobs, partition_of=partition_of)
    runs = [(place, one) for place, one in plan if place not in have]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        # A file that was resumed has the provenance of each part before it.
        for row in (*there, {"provenance": provenance(args, experiment)}):
            write(file, row)
        for row in played(runs, args.jobs):
            write(file, row)


def kept(path: Path) -> list[Row]:
    """Whole lines of a file; the last one may have been cut off when it was written."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: line {len(rows) + 1} is broken, it is played again", file=sys.stderr)
            break
    return rows


def asked_for(args: argparse.Namespace) -> Experiment:
    """The experiment, or the part of it that is asked for."""
    experiment, missing = without_unknown_policies(load_experiment(args.experiment))
    if missing:
        print(f"no such policies, left out: {', '.join(missing)}", file=sys.stderr)
    changes = {name: getattr(args, name) for name in ("seeds", "requests") if getattr(args, name)}
    chosen = only(experiment, variants=names_in(args.variants), cases=names_in(args.cases))
    return Experiment(**{**fields_of(chosen), **changes})


def fields_of(experiment: Experiment) -> dict[str, Any]:
    """The fields themselves; `asdict` would turn what is in them into dictionaries too."""
    return {name: getattr(experiment, name) for name in experiment.__slots__}


def names_in(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def played(runs: list[tuple[Place, RunSettings]], jobs: int) -> Iterator[Row]:
    """Each run as JSON, as soon as it is done."""
    with progress_bar("runs", len(runs)) as advance:
        results = run_all([one for _, one in runs], jobs=jobs)
        for (place, _), result in zip(runs, results, strict=True):
            advance()
            yield {**asdict(place), **run_as_json(result)}


def place_of(row: Row) -> Place:
    """Where a row of the file stands in the table."""
    return Place(*(row[name] for name in Place.__slots__))


def provenance(args: argparse.Namespace, experiment: Experiment) -> dict[str, object]:
    """Under what circumstances the runs that follow were made."""
    return {
        "commit": commit(),
        "file": str(args.experiment),
        "experiment": asdict(experiment),
        "hardware": hardware(),
        "load_average": load_average(),
    }


def write(file: TextIO, content: dict[str, Any]) -> None:
    """One line, on disk at once: a long experiment may be interrupted."""
    file.write(json.dumps(content, allow_nan=False) + "\n")
    file.flush()


def read_rows(path: Path) -> list[Row]:
    """All runs of a file."""
    with path.open(encoding="utf-8") as file:
        return [row for line in file if "provenance" not in (row := json.loads(line))]


def tables(rows: list[Row]) -> str:
    """One table for each case and profile."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["profile"]), []).append(row)
    return "\n\n".join(
        f"### {case}, {profile} (short: at most {group[0]['settings']['short_at_tokens']} tokens)\n\n"
        + markdown_table(group, by=("load",))
        for (case, profile), group in groups.items()
    )


if __name__ == "__main__":
    sys.exit(main())
