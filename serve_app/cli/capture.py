"""Command `capture`: writes the traffic of the last ten minutes as a trace, without any text."""

import argparse
from pathlib import Path

from serve_app.cli.command import Command, print_result, program
from serve_app.cli.status import add_address, api_key_for, default_url, get_response
from serve_app.errors import ServeAppError


class CaptureError(ServeAppError):
    """There is nothing to capture, or the application rejects the request."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, in Mooncake's format (JSON lines)"
    )
    add_address(parser)


def _run(args: argparse.Namespace) -> int:
    url = args.url or default_url()
    answer = get_response(url, "/debug/capture", api_key_for(url, args.api_key))
    if not answer.is_success:
        hint = ": pass an admin key with --api-key" if answer.is_denied else ""
        raise CaptureError(f"the application returned {answer}{hint}")
    lines = answer.body
    count = lines.count(b"\n")
    if not count:
        raise CaptureError(
            "no request with token counts completed in the last ten minutes: nothing is written"
        )
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(lines)
    except OSError as error:
        raise CaptureError(f"{args.out} cannot be written: {error.strerror}") from error
    print_result(
        f"{count:,} requests in {args.out}; replay them with: {program()} simulate --trace {args.out}"
    )
    return 0


COMMAND = Command(
    example="example:\n  ewsjf capture --out out/captured.jsonl",
    configure=_configure,
    run=_run,
)
