"""Sub-commands of `ewsjf`, and their helpers for arguments, files and progress."""

import argparse
import difflib
import errno
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from serve_app.errors import ServeAppError

MAX_PORT = 65_535

# Window for the estimate of the remaining time. It must include several of the slowest steps.
_SPEED_OVER_S = 1_800.0


class CommandParser(argparse.ArgumentParser):
    """Parser that reports errors in one line, without the usage, which `--help` prints."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reject unknown arguments here, because this parser has the sub-command's name and options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            advice = f" (did you mean {near[0]}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return found, unknown


def program() -> str:
    """Return how to call this program in a new terminal, for messages that suggest a command.

    It is `ewsjf` if that is on the path, and the path of the program otherwise. A new terminal does not have
    the path of an activated environment.
    """
    own, known = Path(sys.executable).with_name("ewsjf"), shutil.which("ewsjf")
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m serve_app"
    if known is not None and own.samefile(known) and "VIRTUAL_ENV" not in os.environ:
        return "ewsjf"
    with suppress(OSError, ValueError):  # the working directory is deleted, or does not contain it
        own = own.relative_to(Path.cwd())
    return shlex.quote(str(own))


def print_result(text: str) -> None:
    """Write results to standard output."""
    sys.stdout.write(text + "\n")


def warn(text: str) -> None:
    """Write a warning or an error to standard error."""
    sys.stderr.write(text + "\n")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a draft of `path`, which replaces it at the end. After an error, `path` is as it was before.

    The draft is `path` itself, without that guarantee, for a device such as /dev/stdout, and for a file
    beside which none can be created.

    Raises:
        ServeAppError: it cannot be written; the message names it.
    """
    draft = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not path.exists():
            path = path.resolve()
            draft = _create_draft(path)
        yield draft
        if draft != path:
            _replace(path, draft)
    except OSError as exc:
        raise ServeAppError(f"{path} cannot be written: {exc.strerror or exc}") from exc
    finally:
        if draft != path:
            draft.unlink(missing_ok=True)


def _create_draft(path: Path) -> Path:
    """Create an empty file beside `path`, with its permissions; return `path` if only that can be written."""
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.touch()
        if path.exists():
            shutil.copymode(path, draft)
    except OSError as exc:
        if exc.errno not in {errno.EACCES, errno.EROFS, errno.ENAMETOOLONG}:
            raise
        return path
    return draft


def _replace(path: Path, draft: Path) -> None:
    try:
        draft.replace(path)
    except OSError as exc:
        # A file that is mounted into a container cannot be replaced, but written.
        if exc.errno != errno.EBUSY:
            raise
        shutil.copyfile(draft, path)


def write_text(path: Path, text: str) -> None:
    """Write a file, or leave it as it was; raise as `writing`."""
    with writing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a result as JSON. Missing values are null."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def arguments_as_json(args: argparse.Namespace, *, omit: Collection[str] = ()) -> dict[str, object]:
    """Return a command's arguments for provenance. Paths and infinity become text, for JSON."""
    return {
        name: _plain(value) for name, value in vars(args).items() if name != "command" and name not in omit
    }


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) or value == math.inf else value


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def port_number(text: str) -> int:
    """Parse a port."""
    value = positive_int(text)
    if value > MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_PORT}, got {text!r}")
    return value


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = positive_float(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(value)


def add_number(
    group: "argparse._ActionsContainer",
    name: str,
    text: str,
    default: float | None = None,
    metavar: str | None = None,
    kind: Callable[[str], float] = positive_float,
) -> None:
    """Add an option with a number, above 0 unless `kind` parses others. Its help ends with the default."""
    stated = text if default is None else f"{text} (default: %(default)s)"
    group.add_argument(name, type=kind, default=default, metavar=metavar, help=stated)


add_whole = partial(add_number, kind=positive_int)
"""Add an option with a whole number of at least 1, otherwise as `add_number`."""


def add_jobs(group: "argparse._ActionsContainer", more: str = "") -> None:
    """Add the number of processes."""
    jobs = os.cpu_count() or 1
    text = f"processes (default: one per core){more}"
    group.add_argument("--jobs", type=positive_int, default=jobs, help=text)


def add_settings(group: "argparse._ActionsContainer", what: str) -> None:
    """Add `--set`, which `workload_arguments.settings_of` reads."""
    text = f"{what}, such as backpressure.target_waiting=5; may be repeated"
    group.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help=text)


class ProgressCallback(Protocol):
    """Callable that advances a progress bar."""

    def __call__(self, steps: int = 1) -> object:
        """Count further steps."""
        ...


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[ProgressCallback]:
    """Show a progress bar on a terminal, and yield a callable that advances it.

    Args:
        total: number of steps, possibly estimated: the bar grows if there are more, and ends with the actual
            number.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_, **__: None
        return
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Four updates per second, because drawing uses CPU that a load generator needs. A step may take minutes.
    with Progress(
        *columns, console=console, refresh_per_second=4, speed_estimate_period=_SPEED_OVER_S
    ) as progress:
        task = progress.add_task(what, total=total)

        def advance(steps: int = 1) -> None:
            nonlocal total
            progress.advance(task, steps)
            done = round(progress.tasks[0].completed)
            if done > total:
                total = done
                progress.update(task, total=total)

        yield advance
        progress.update(task, total=progress.tasks[0].completed)
