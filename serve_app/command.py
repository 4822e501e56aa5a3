"""What a sub-command of `python -m serve_app` is, and what several of them share."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command.

    Attributes:
        name: the word on the command line.
        summary: one line for the list of commands.
        example: shown at the end of its `--help`.
        configure: adds its arguments.
        run: does the work; returns the exit status. A `ServeAppError` or `ValueError` from it is shown as one
            line.
    """

    name: str
    summary: str
    example: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def say(text: str) -> None:
    """Write results to standard output."""
    sys.stdout.write(text + "\n")


def warn(text: str) -> None:
    """Write what a user should know to standard error."""
    sys.stderr.write(text + "\n")


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a result; figures that do not exist are null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def given_arguments(args: argparse.Namespace, *, leave_out: Collection[str] = ()) -> dict[str, object]:
    """What the command was given, for the provenance of a result: paths and infinity, no JSON, are texts."""
    return {
        name: str(value) if isinstance(value, Path) or value == math.inf else value
        for name, value in vars(args).items()
        if name != "command" and name not in leave_out
    }


def positive_float(text: str) -> float:
    """An argument type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def positive_int(text: str) -> int:
    """An argument type: a whole number of at least 1."""
    value = positive_float(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(value)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, nothing in a pipe; yields what to call for each one done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Four times a second: drawing costs CPU that a load generator needs.
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
