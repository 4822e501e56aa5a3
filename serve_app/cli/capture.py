"""Command `capture`: writes the traffic of the last ten minutes as a trace, without any text."""

import argparse
from pathlib import Path

from serve_app.cli.application import ApplicationClient, add_address
from serve_app.cli.command import print_result, program, writing
from serve_app.errors import ServeAppError


class CaptureError(ServeAppError):
    """There is nothing to capture."""


EXAMPLE = "example:\n  ewsjf capture --out out/captured.jsonl"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, in Mooncake's format (JSON lines)"
    )
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    lines = ApplicationClient(args).response("/debug/capture").body
    count = lines.count(b"\n")
    if not count:
        raise CaptureError(
            "no request with token counts completed in the last ten minutes: nothing is written"
        )
    with writing(args.out) as draft:
        draft.write_bytes(lines)
    print_result(
        f"{count:,} requests in {args.out}; replay them with: {program()} simulate --trace {args.out}"
    )
    return 0
