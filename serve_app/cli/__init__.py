"""Command line: a table of sub-commands, each in a module that is imported on use.

Importing all modules takes most of a second, which is too long for a completion after the Tab key.

In reading order: `command` (helpers of all commands), `application` (the client of a running application),
`serve` (a folder), and the commands, each in a module named as in `COMMANDS`; `report` is a folder, too.
`simulate` and `plan` share `workload_arguments`, and `templates` has the configurations of `init`.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import serve_app
from serve_app.cli.command import CommandParser, program, warn
from serve_app.errors import ServeAppError


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Entry of the command table.

    The module of a command defines `EXAMPLE`, which ends its `--help`; `configure`, which adds its arguments
    to a parser; and `run`, which returns the exit status for the parsed ones. A `ServeAppError` or
    `ValueError` of `run` is printed as one line.

    Attributes:
        summary: one line for the list of commands, which is printed without importing their modules.
        module_path: path of the command's module within this package; by default its name.
    """

    name: str
    summary: str
    module_path: str = ""

    @property
    def module(self) -> str:
        """Name of the command's module."""
        return f"{__name__}.{self.module_path or self.name}"

    def load(self) -> ModuleType:
        """Import and return the command's module."""
        return importlib.import_module(self.module)


COMMANDS: tuple[CommandEntry, ...] = (
    CommandEntry("init", "write a first configuration"),
    CommandEntry("check", "validate a configuration before anything starts, with line numbers"),
    CommandEntry("serve", "check a configuration and serve its application until Ctrl-C", "serve.command"),
    CommandEntry("deploy", "apply a changed configuration, and restore the old one if that fails"),
    CommandEntry("stop", "stop an application gracefully: in-flight requests are completed"),
    CommandEntry(
        "status", "show what is wrong with a running application, its queues, replicas, tenants and tuner"
    ),
    CommandEntry("mode", "show or set the share of a running application's traffic that is scheduled"),
    CommandEntry("explain", "show where a request spent its time, and why it was queued"),
    CommandEntry("batch", "submit a file of requests as a batch; list, cancel and fetch batches"),
    CommandEntry(
        "report", "one page on recent latencies and waits, and what scheduling changes", "report.command"
    ),
    CommandEntry("capture", "write the requests of the last ten minutes as a trace, without their text"),
    CommandEntry("keys", "create, list and revoke API keys in a file, and show the usage of each"),
    CommandEntry("simulate", "simulate a trace on a fleet and compare policies"),
    CommandEntry("replay", "replay a decision log in a new scheduler and compare the commands"),
    CommandEntry("plan", "size a fleet for latency limits: one pool or two, verified in simulation"),
    CommandEntry("calibrate", "fit an engine profile to the request timestamps of a real engine"),
    CommandEntry("completion", "print a completion script for a shell"),
)
"""All sub-commands. To add one, write its module, and add it here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        The exit status: the command's own, 2 for an error that the user can correct, 130 when interrupted,
        141 if the reader of its output has left.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    words, parser = list(sys.argv[1:] if argv is None else argv), _parser()
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    try:
        status: int = args.command.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output, such as `head`, has left.
        _discard_output()
        return 141
    except (ServeAppError, ValueError, RecursionError, OSError) as exc:
        warn(f"{words[0]}: {_message_of(exc)}")
        with suppress(OSError):
            sys.stdout.flush()
            return 2
        _discard_output()
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _message_of(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "an input is nested too deeply: check that the files have the right format"
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return str(error)


def _discard_output() -> None:
    """Discard what cannot be written to standard output, which Python flushes once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complete() -> None:
    """Print completions for the shell and exit."""
    import argcomplete  # noqa: PLC0415 - only needed here

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(_parser(words), always_complete_options=False)


def _parser(loaded: Container[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands. `loaded` are loaded now, because argcomplete inspects them first."""
    parser = CommandParser(
        prog=program(),
        description=serve_app.__doc__.partition("\n")[0] if serve_app.__doc__ else None,
        epilog=f"example:\n  {program()} serve\n  {program()} simulate --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=serve_app.__version__)
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_EntryParser
    )
    for entry in COMMANDS:
        own = commands.add_parser(
            entry.name,
            help=entry.summary,
            description=entry.summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.entry = entry
        if entry.name in loaded:
            own.load()
    return parser


class _EntryParser(CommandParser):
    """Parser of a sub-command, which loads the command (`entry`) when it has arguments to parse."""

    entry: CommandEntry | None = None

    def load(self) -> None:
        """Add the arguments of the command. Idempotent."""
        if self.entry is None:
            return
        command, self.entry = self.entry.load(), None
        self.epilog = re.sub(r"(?m)^  ewsjf ", f"  {program()} ", command.EXAMPLE)
        command.configure(self)
        self.set_defaults(command=command)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Load the command and parse its arguments."""
        self.load()
        return super().parse_known_args(args, namespace)
