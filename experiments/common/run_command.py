"""`experiments/run`: runs experiments, writes their rows and prints their tables.

Each row is on disk once measured, and the results file is replaced at the end.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common.catalogue import Catalogue
from experiments.common.config import as_json, read_settings
from experiments.common.experiment import Context, Experiment
from experiments.common.provenance import code_commit, now_utc, this_machine
from experiments.common.rows import Row, line_of, read_rows, read_whole_rows, rounded
from serve_app.cli.command import positive_int, print_result, warn
from serve_app.errors import ServeAppError


def partial_of(out: Path) -> Path:
    """Return the file of rows while the measurement is incomplete."""
    return out.with_name(f"{out.name}.partial")


def play(
    name: str, experiment: Experiment[Any], settings: object, out: Path, *, jobs: int, resume: bool = False
) -> list[Row]:
    """Measure, and replace `out` by the rows once all are complete.

    Args:
        resume: keep the rows of an interrupted run or, without one, of `out`; add what is missing.
    """
    partial = partial_of(out)
    rows = []
    if resume:
        rows = read_whole_rows(partial) if partial.exists() else read_rows(out)
    keys = [row.key for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(f"{line_of(row)}\n")
        for row in _measured(name, experiment, settings, Context(jobs, tuple(keys))):
            if row.key in keys:
                continue
            rows.append(row)
            # At once, because an experiment may be interrupted.
            file.write(f"{line_of(row)}\n")
            file.flush()
    partial.replace(out)
    return rows


def _measured(name: str, experiment: Experiment[Any], settings: object, context: Context) -> Iterator[Row]:
    commit, resolved = code_commit(), as_json(settings)
    for one in experiment.play(settings, context):
        yield Row(
            experiment=name,
            key=one.key,
            figures=rounded(one.figures),
            seeds=tuple(one.seeds),
            traces=tuple(one.traces),
            settings=resolved if one.settings is None else one.settings,
            commit=commit,
            machine=this_machine(),
            measured_at=now_utc(),
        )


_QUICK_S = 60.0
_EPILOG = """examples:
  experiments/run batch                           replaces experiments/batch/results.jsonl
  experiments/run batch --quick                   a smoke test: small, into a temporary file
  experiments/run batch --set seeds=2 --out out/batch.jsonl
  experiments/run --all --quick
"""


def unwind_on_signals() -> None:
    """Raise `KeyboardInterrupt` on signals, so that the applications of an experiment end with it."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # `nohup` ignores SIGHUP on purpose. A shell ignores SIGINT for every command in the background.
        if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _interrupt)


def _interrupt(*_: object) -> None:
    # A pool of processes would complete its simulations first.
    for process in multiprocessing.active_children():
        process.terminate()
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None, catalogue: Catalogue | None = None) -> int:
    """Run the requested experiments.

    Returns:
        The exit status: 1 if one failed, 2 for a wrong command line, 130 after an interrupt.
    """
    there = catalogue or Catalogue()
    args = _arguments(argv)
    if args.list:
        for name in there.names():
            print_result(f"{name:16} {there.question(name)}")
        return 0
    wrong = _contradiction(args)
    if wrong:
        warn(f"experiments/run: {wrong}")
        return 2
    names = there.names() if args.all else args.names
    try:
        failed = [name for name in names if not _play_one(name, args, there)]
    except KeyboardInterrupt:
        warn("experiments/run: interrupted")
        return 130
    if failed and len(names) > 1:
        warn(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="experiments/run",
        description="Plays experiments, and writes what was measured to their results.jsonl.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments to play")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--list", action="store_true", help="print which there are, and play nothing")
    parser.add_argument("--quick", action="store_true", help="small sizes; results.jsonl stays as it is")
    parser.add_argument("--out", type=Path, help="write the rows there instead")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="KEY=VALUE",
        help="change a setting of config.yaml, nested ones by dotted path; needs --quick or --out",
    )
    parser.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (%(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that are there, and play what is missing"
    )
    return parser.parse_args(argv)


def _contradiction(args: argparse.Namespace) -> str | None:
    if bool(args.names) == args.all:
        return "name one or more experiments, or pass --all; --list shows the names"
    if args.out is not None and (args.all or len(args.names) > 1):
        return "--out takes the rows of one experiment: name only one"
    if args.changes and args.out is None and not args.quick:
        return "--set needs --quick or --out: results.jsonl holds what config.yaml says"
    if args.resume and args.quick and args.out is None:
        return "--resume needs rows to keep: pass --out"
    return None


def _play_one(name: str, args: argparse.Namespace, there: Catalogue) -> bool:
    """Return whether it succeeded; an experiment that cannot run on this machine is skipped, not failed."""
    began = time.perf_counter()
    try:
        experiment = there.experiment(name)
        if args.all and (reason := experiment.unavailable() or experiment.only_by_name):
            warn(f"{name}: left out: {reason}")
            return True
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder) / "results.jsonl" if args.quick else there.results(name)
            rows = _rows(name, args, there, args.out or scratch)
        _show(name, rows, there)
    except (ServeAppError, ValueError) as error:
        warn(f"experiments/run: {name}: {error}")
        return False
    took_s = time.perf_counter() - began
    warn(f"{name}: {len(rows)} rows in {took_s:.0f} s")
    if args.quick and took_s > _QUICK_S:
        warn(f"{name}: --quick should take less than a minute: make `quick` in its config.yaml smaller")
    return True


def _rows(name: str, args: argparse.Namespace, there: Catalogue, out: Path) -> list[Row]:
    experiment = there.experiment(name)
    settings = read_settings(there.config(name), experiment.settings, quick=args.quick, changes=args.changes)
    return play(name, experiment, settings, out, jobs=args.jobs, resume=args.resume)


def _show(name: str, rows: Sequence[Row], there: Catalogue) -> None:
    for title, table in there.tables(name).items():
        try:
            print_result(f"{name}/{title}\n\n{table.written(rows)}\n")
        except ServeAppError as error:
            warn(f"{name}/{title}: {error}")


if __name__ == "__main__":
    unwind_on_signals()
    sys.exit(main())
