"""Serve an application, look into it, and plan, simulate and tune one."""

import argparse
from collections.abc import Sequence

import serve_app
from serve_app.bench.command import COMMAND as BENCH
from serve_app.calibration.command import COMMAND as CALIBRATE
from serve_app.checking.command import COMMAND as CHECK
from serve_app.command import Command, CommandParser, warn
from serve_app.errors import ServeAppError
from serve_app.launch.command import COMMAND as SERVE
from serve_app.launch.stop_command import COMMAND as STOP
from serve_app.planning.command import COMMAND as PLAN
from serve_app.simulation.command.command import simulate_command
from serve_app.simulation.command.replay import COMMAND as REPLAY
from serve_app.status import COMMAND as STATUS
from serve_app.tuning import LearnedPartitions
from serve_app.tuning.command import COMMAND as TUNE

COMMANDS: tuple[Command, ...] = (
    SERVE,
    STOP,
    CHECK,
    STATUS,
    simulate_command(LearnedPartitions()),
    REPLAY,
    BENCH,
    PLAN,
    TUNE,
    CALIBRATE,
)
"""All sub-commands. To add one, write a module with a `Command`, and name it here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        The exit status: the command's own, 2 for an error that the user can correct, 130 when interrupted.
    """
    args = _parser().parse_args(argv)
    command: Command = args.command
    try:
        return command.run(args)
    except (ServeAppError, ValueError) as exc:
        warn(f"{command.name}: {exc}")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m serve_app",
        description=__doc__,
        epilog="example:\n  python -m serve_app bench --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=serve_app.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            epilog=command.example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(own)
        own.set_defaults(command=command)
    return parser
