"""Command `report`: one page about the last minutes: latencies, waits, and what scheduling changes."""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.cli.application import ApplicationClient, ApplicationError, add_address
from serve_app.cli.command import (
    Command,
    add_number,
    add_whole,
    print_result,
    progress_bar,
    warn,
    write_text,
)
from serve_app.cli.report.forecast import WINDOWS, Forecast
from serve_app.cli.report.page import as_html, as_text
from serve_app.cli.report.recording import Document, Recording, ReportError, is_batch, observed, recording_of
from serve_app.core import SchedulerSettings
from serve_app.core.settings_base import read
from serve_app.errors import SettingsError

_EXAMPLE = """example:
  ewsjf mode observe                       # then wait ten minutes
  ewsjf report --html out/observed.html --json > out/observed.json
  ewsjf mode active                        # then wait ten minutes
  ewsjf report --compare out/observed.json --html out/active.html

The application must have served at least 200 streamed responses in the window. In mode observe, the report
predicts what scheduling changes, if the twin's error is small. Exit status 1: there is too little to report.
"""
_MAX_MINUTES = 10


def _configure(parser: argparse.ArgumentParser) -> None:
    add_number(
        parser, "--minutes", "length of the window, at most 10; it begins at the last change of the mode", 10
    )
    add_whole(
        parser,
        "--short-at",
        "maximum tokens of a short prompt (default: as in --compare, else the boundary of the first of "
        "several pools, else the median prompt)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="earlier report, written with --json, to compare with; adds a verdict",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML page")
    parser.add_argument("--json", action="store_true", help="print the report's document as JSON")
    add_address(parser)


def _run(args: argparse.Namespace) -> int:
    if args.minutes > _MAX_MINUTES:
        raise SettingsError(f"--minutes must be at most {_MAX_MINUTES}, got {args.minutes:g}")
    earlier = None if args.compare is None else _earlier(args.compare)
    try:
        document = _document(args, earlier)
    except ReportError as error:
        warn(f"report: {error}")
        return 1
    if args.html is not None:
        write_text(args.html, as_html(document))
    print_result(json.dumps(document, indent=1, allow_nan=False) if args.json else as_text(document))
    return 0


def _earlier(path: Path) -> Document:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"--compare {path}: not JSON ({error}); write it with `report --json`") from error
    if not isinstance(found, dict) or not {"observed", "short_at_tokens"} <= found.keys():
        raise SettingsError(f"--compare {path}: not a report; write it with `report --json`")
    return {**found, "earlier": None}


def _document(args: argparse.Namespace, earlier: Document | None) -> Document:
    client = ApplicationClient(args)
    status, queue, mode = (_first(client, path) for path in ("/debug/status", "/debug/queue", "/admin/mode"))
    if "settings" not in queue or "windows" not in mode:
        raise ApplicationError(f"{client.url} is of an older release, without what a report needs: update it")
    model, window = status["model"], mode["windows"][-1]
    body = client.response("/debug/capture?full=true").body
    lines = [line for line in map(json.loads, body.splitlines()) if line.get("model") == model]
    recording = recording_of(lines, args.minutes, window["since"])
    short_at = args.short_at or (earlier or {}).get("short_at_tokens") or _short_at(queue, status, recording)
    settings = read(SchedulerSettings, queue["settings"], as_file=False)
    forecast = Forecast(recording, status["replicas"], settings, short_at)
    with progress_bar("simulated windows", WINDOWS) as on_window:
        return {
            "model": model,
            "created": time.time(),
            "active_share": window["active_share"],
            "policy": settings.policy,
            "short_at_tokens": short_at,
            "observed": observed(recording, short_at),
            "short_waits": forecast.short_waits(),
            "forecast": forecast.document(on_window) if window["active_share"] == 0 else None,
            "earlier": earlier,
        }


def _first(client: ApplicationClient, path: str) -> Mapping[str, Any]:
    models = client.models(path)
    if not models:
        raise ApplicationError(f"{client.url} serves no model")
    if "error" in models[0]:
        raise ApplicationError(f"{models[0]['model']}: {models[0]['error']}")
    return models[0]


def _short_at(queue: Mapping[str, Any], status: Mapping[str, Any], recording: Recording) -> int:
    if len(status["pools"]) > 1:
        return int(queue["b_short_tokens"])
    lengths = [record.prompt_tokens for record in recording.records if not is_batch(record)]
    return max(1, statistics.median_low(lengths or [1]))


COMMAND = Command(example=_EXAMPLE, configure=_configure, run=_run)
