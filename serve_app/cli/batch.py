"""Command `batch`: submits files of requests to the Batch API, and lists, cancels and fetches batches."""

import argparse
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.cli.application import ApplicationClient, FileForm, UnreachableError, add_address
from serve_app.cli.command import print_result, program, progress_bar, warn, writing
from serve_app.errors import ServeAppError
from serve_app.lab.tables import documents_table

Batch = Mapping[str, Any]

_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
# Fields of a batch that other servers may lack.
_FIELDS = ("id", "status", "request_counts", "output_file_id", "error_file_id", "errors")
_POLL_S = 1.0
# The application may be restarted while a batch runs.
_UNREACHABLE_S = 300.0
_TIMEOUT_S = 600.0


class BatchCommandError(ServeAppError):
    """A file cannot be read, or a batch is not in the required state."""


EXAMPLE = (
    "example:\n"
    "  ewsjf batch submit requests.jsonl --wait --out out/results.jsonl\n"
    "  ewsjf batch submit requests.jsonl --window 6h\n"
    "  ewsjf batch list\n"
    "  ewsjf batch cancel batch_3f9a2c17b0de"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "action",
        choices=("submit", "list", "show", "cancel", "fetch"),
        help="submit: upload a file and create its batch; list: all batches; show: one batch as JSON; "
        "cancel: end a batch; fetch: write the results of a batch",
    )
    parser.add_argument("target", nargs="?", metavar="FILE|ID", help="file to submit, or id of a batch")
    parser.add_argument(
        "--endpoint", help="with submit: path of the requests (default: that of the first request)"
    )
    parser.add_argument(
        "--window",
        default="24h",
        help="with submit: time after which unfinished requests expire, such as 30m (default: %(default)s)",
    )
    parser.add_argument(
        "--wait", action="store_true", help="with submit: wait for the end, and fetch the results"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="with submit --wait and fetch: file for the results (default: FILE or ID, with .output.jsonl); "
        "errors are written beside it",
    )
    parser.add_argument("--json", action="store_true", help="print documents of the application as JSON")
    add_address(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    client = ApplicationClient(args)
    if args.action == "list":
        _list(client, as_json=args.json)
        return 0
    if not args.target:
        needed = (
            "a file of requests" if args.action == "submit" else "the id of a batch; `batch list` shows it"
        )
        raise BatchCommandError(f"{args.action} needs {needed}")
    if args.action == "submit":
        return _submit(client, args)
    action = "/cancel" if args.action == "cancel" else ""
    batch = client.document(
        f"/v1/batches/{args.target}{action}", *_FIELDS, method="POST" if action else "GET"
    )
    if args.action == "fetch":
        return _fetch(client, batch, args.out or Path(f"{args.target}.output.jsonl"))
    print_result(json.dumps(batch, indent=1) if args.json or args.action == "show" else _line(batch))
    return 0


def _submit(client: ApplicationClient, args: argparse.Namespace) -> int:
    path = Path(args.target)
    endpoint = args.endpoint or _endpoint_of(path)
    megabytes = max(1, os.path.getsize(path) // 1_000_000)  # noqa: PTH202 - checked by _endpoint_of
    with progress_bar("MB uploaded", megabytes) as advance:
        sent = 0

        def on_piece(count: int) -> None:
            nonlocal sent
            before, sent = sent, sent + count
            advance(sent // 1_000_000 - before // 1_000_000)

        form = FileForm(path, {"purpose": "batch"}, on_piece)
        file = client.document("/v1/files", "id", method="POST", content=form, timeout_s=_TIMEOUT_S)
    content = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": args.window}
    batch = client.document("/v1/batches", *_FIELDS, method="POST", content=content, timeout_s=_TIMEOUT_S)
    if not args.wait or batch["status"] == "failed":
        print_result(json.dumps(batch, indent=1) if args.json else _line(batch))
        if batch["status"] != "failed":
            warn(f"follow it by `{program()} batch show {batch['id']}`, or wait for it by --wait")
        return _report_errors(batch)
    warn(f"batch {batch['id']}; Ctrl-C leaves it running")
    batch = _wait(client, batch)
    if args.json:
        print_result(json.dumps(batch, indent=1))
    return _fetch(client, batch, args.out or path.with_suffix(".output.jsonl"))


def _endpoint_of(path: Path) -> str:
    """Return the endpoint of the first request of a file.

    Raises:
        BatchCommandError: it cannot be read, or its first line is not a request.
    """
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        return str(json.loads(first)["url"])
    except OSError as error:
        raise BatchCommandError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        example = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        raise BatchCommandError(f"{path}: the first line must be a request such as {example}") from None


def _wait(client: ApplicationClient, batch: Batch) -> Batch:
    reached_at = time.monotonic()
    with progress_bar("requests", batch["request_counts"]["total"]) as advance:
        done = 0
        while True:
            counts = batch["request_counts"]
            ended = counts["completed"] + counts["failed"]
            advance(ended - done)
            done = ended
            if batch["status"] not in _OPEN:
                return batch
            time.sleep(_POLL_S)
            try:
                batch = client.document(f"/v1/batches/{batch['id']}")
                reached_at = time.monotonic()
            except UnreachableError as error:
                if time.monotonic() - reached_at > _UNREACHABLE_S:
                    message = f"{error}. The batch {batch['id']} remains"
                    raise BatchCommandError(message) from error


def _fetch(client: ApplicationClient, batch: Batch, path: Path) -> int:
    if batch["status"] in _OPEN:
        raise BatchCommandError(f"{batch['id']} is {batch['status']}: its results exist once it has ended")
    errors = path.with_name(
        path.name.replace(".output", ".error") if ".output" in path.name else path.name + ".error"
    )
    for file_id, place in ((batch["output_file_id"], path), (batch["error_file_id"], errors)):
        if file_id is not None:
            with writing(place) as draft, draft.open("wb") as out:
                client.save(f"/v1/files/{file_id}/content", out, _TIMEOUT_S)
            warn(f"written: {place}")
    print_result(_line(batch))
    return _report_errors(batch)


def _report_errors(batch: Batch) -> int:
    """Print the errors of a failed batch; return the exit status: 1 unless every request was completed."""
    for error in (batch["errors"] or {}).get("data", ()):
        place = f"line {error['line']}: " if error.get("line") else ""
        warn(f"{place}{error['message']}")
    return 1 if batch["errors"] or batch["request_counts"]["failed"] else 0


def _list(client: ApplicationClient, *, as_json: bool) -> None:
    batches: list[Batch] = []
    after = ""
    while True:
        page = client.document(f"/v1/batches?limit=100{after}", "data", "has_more")
        batches += page["data"]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    if as_json:
        print_result(json.dumps(batches, indent=1))
        return
    if not batches:
        print_result("there are no batches")
        return
    rows = [
        {**batch, **{name: _time(batch[name]) for name in ("created_at", "expected_end_at")}}
        for batch in batches
    ]
    print_result(documents_table(_BATCHES, rows, text_columns=3))


_BATCHES = (
    "id: {id} | status: {status} | created: {created_at} | requests: {request_counts.total:,} | "
    "completed: {request_counts.completed:,} | failed: {request_counts.failed:,} | "
    "expected end: {expected_end_at}"
)


def _line(batch: Batch) -> str:
    counts = batch["request_counts"]
    return (
        f"{batch['id']}: {batch['status']}, {counts['completed']:,} of {counts['total']:,} requests "
        f"completed, {counts['failed']:,} failed"
    )


def _time(seconds: int | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
