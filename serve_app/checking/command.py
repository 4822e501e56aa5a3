"""The command `python -m serve_app check`: what is wrong with configurations, before anything starts."""

import argparse
from pathlib import Path

from serve_app.checking.checks import check_file
from serve_app.command import Command, say, warn


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help="configurations to check")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="another machine is to run it: do not ask for ports, cores, GPUs, memory and folders here",
    )


def _run(args: argparse.Namespace) -> int:
    status = 0
    for config in args.configs:
        mistakes = check_file(config, on_this_machine=not args.elsewhere).mistakes
        for mistake in mistakes:
            warn(mistake.located(config))
        if mistakes:
            status = 2
        else:
            say(f"{config} is fine")
    return status


COMMAND = Command(
    name="check",
    summary="say what is wrong with a configuration, with line numbers, before anything starts",
    example="example:\n  python -m serve_app check configs/local.yaml",
    configure=_configure,
    run=_run,
)
