"""Command `mode`: shows or sets the share of a running application's traffic that is scheduled."""

import argparse
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from serve_app.cli.application import ApplicationClient, add_address
from serve_app.cli.command import print_result
from serve_app.errors import ServeAppError
from serve_app.lab.tables import documents_table

_PATH = "/admin/mode"


def _share(text: str) -> float:
    """Parse a share such as `0.1` or `10%`."""
    try:
        share = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 0.1 or 10%%, got {text!r}")
    return share


EXAMPLE = "example:\n  ewsjf mode active --share 10%"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "mode",
        nargs="?",
        choices=("observe", "active"),
        help="observe: requests are sent to the replica with the fewest requests, and the scheduler only "
        "observes; active: requests are scheduled (default: show the current mode)",
    )
    parser.add_argument(
        "--share",
        type=_share,
        help="with active: share of the requests to schedule, such as 0.1 or 10%% (default: all)",
    )
    parser.add_argument("--model", help="only this model (default: all)")
    parser.add_argument("--json", action="store_true", help="print the application's document as JSON")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if args.share is not None and args.mode != "active":
        raise ServeAppError("--share needs `mode active`")
    client = ApplicationClient(args)
    if args.mode is None:
        models = client.models(_PATH)
    else:
        share = 0.0 if args.mode == "observe" else 1.0 if args.share is None else args.share
        models = client.models(_PATH, method="POST", content={"active_share": share, "model": args.model})
    if args.json:
        print_result(json.dumps({"models": models}, indent=1))
    else:
        print_result("\n".join(line for model in models for line in _lines(model)))
    return 1 if any("error" in model for model in models) else 0


def _lines(model: Mapping[str, Any]) -> Iterator[str]:
    if "error" in model:
        yield f"{model['model']}: {model['error']}"
        return
    share = model["active_share"]
    target = model.get("target_share", share)
    rises = f", rising to {target:.0%} in steps while first tokens are no slower" if target > share else ""
    yield f"{model['model']}: {model['mode']}, {share:.0%} of the requests are scheduled{rises}"
    # A scheduler of an older release does not report windows.
    rows = [row for window in model.get("windows", ()) for row in _rows(window)]
    if rows:
        yield "time to first token, by window between two changes:"
        yield documents_table(_WINDOWS, rows, text_columns=4)


_WINDOWS = (
    "from: {from} | to: {to} | scheduled: {active_share:.0%} | requests that were: {were} | "
    "number: {all.requests:,} | p50 s: {all.ttft_p50_s:.3f} | p99 s: {all.ttft_p99_s:.3f} | "
    "short p50 s: {short.ttft_p50_s:.3f} | short p99 s: {short.ttft_p99_s:.3f}"
)


def _rows(window: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    times = {"from": _clock(window["since"]), "to": _clock(window["until"])}
    for name in ("scheduled", "bypassed"):
        if window[name]["all"]["requests"]:
            yield {**window, **window[name], **times, "were": name}


def _clock(at: float | None) -> str:
    return "now" if at is None else f"{datetime.fromtimestamp(at, UTC).astimezone():%m-%d %H:%M:%S}"
