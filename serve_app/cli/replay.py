"""Command `replay`: feeds a decision log to a new scheduler and compares its decisions."""

import argparse
from pathlib import Path

from serve_app.cli.command import ProgressCallback, print_result, progress_bar, write_json
from serve_app.core.decision_log import DecisionLogError, LoggedRun, read_runs, replay
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES

EXAMPLE = """example:
  ewsjf simulate --trace paper-mix --policy fcfs,ewsjf --requests 2000 --log out/decisions.jsonl
  ewsjf replay out/decisions.jsonl

A live scheduler writes such a log if its model has `decision_log: {path: ...}`.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("log", type=Path, help="file of `simulate --log`, or of a model's `decision_log`")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result of the comparison")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        lines = args.log.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise DecisionLogError(f"cannot read {args.log}: {exc.strerror}") from exc
    # Nearly every line is a decision.
    with progress_bar("decisions", len(lines)) as advance:
        rows = [_compared(run, advance) for run in read_runs(lines)]
    if not rows:
        raise DecisionLogError(f"{args.log} has no run: its first line must be a header")
    for row in rows:
        verdict = "all commands are equal" if row["same"] else row["difference"]
        print_result(
            f"{_named(row['run'])}: {row['decisions']:,} decisions, {row['commands']:,} commands; {verdict}"
        )
    if args.json is not None:
        write_json(args.json, {"runs": rows})
    return 0 if all(row["same"] for row in rows) else 1


def _compared(run: LoggedRun, advance: ProgressCallback) -> dict[str, object]:
    difference = replay(run, SIMULATED_POLICIES, advance)
    return {
        "run": {"policy": run.header.settings.policy, **run.header.run},
        "decisions": len(run.decisions),
        "commands": sum(len(decision.commands) for _, decision in run.decisions),
        "same": difference is None,
        "difference": "" if difference is None else str(difference),
    }


def _named(run: object) -> str:
    assert isinstance(run, dict)
    return ", ".join(f"{key} {value}" for key, value in run.items())
