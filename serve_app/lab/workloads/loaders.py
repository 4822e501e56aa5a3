"""Loaders of public trace formats, which are recognised by a file's first line.

    azure      TIMESTAMP,ContextTokens,GeneratedTokens       Azure 2023 and 2024; timestamps of seven decimals
    burstgpt   Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    mooncake   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} per line
    plain      arrival_s,prompt_tokens,output_tokens[,tenant][,priority]

A row without a valid request is counted by reason, with the line of the first one, and never dropped
silently. Arrivals are shifted so that the first is at 0, and sorted (stable).
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from serve_app.lab.workloads.trace import SkippedRows, Trace, TraceError, TraceRequest
from serve_app.request import PriorityClass

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A file format: the columns that identify it, and its row parser."""

    name: str
    columns: frozenset[str]
    read_row: Callable[[Row], TraceRequest]


class _RowError(ValueError):
    """A row has no valid request; the message is the reason under which it is counted."""


def load_trace(path: Path) -> Trace:
    """Read a trace file, plain or `.gz`.

    Raises:
        TraceError: the file is missing, has an unknown format, or no readable row.
    """
    try:
        with _open(path) as lines:
            trace_format, rows = _rows(path, lines)
            requests, skipped = _read(trace_format, rows)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as exc:
        raise TraceError(f"cannot read trace {path}: {exc}") from exc
    if not requests:
        raise TraceError(f"no row of {path} has a request: {_describe(skipped)}")
    requests.sort(key=lambda request: request.arrival_s)
    start_s = requests[0].arrival_s
    return Trace(
        name=path.name,
        source=f"file {path} ({trace_format.name} format)",
        requests=tuple(replace(request, arrival_s=request.arrival_s - start_s) for request in requests),
        skipped=skipped,
    )


def describe_skipped(trace: Trace) -> str:
    """Return a sentence about the skipped rows; empty if there are none."""
    return _describe(trace.skipped) if trace.skipped else ""


def _describe(skipped: Mapping[str, SkippedRows]) -> str:
    return "; ".join(
        f"{rows.count:,} rows skipped: {reason} (first: {rows.first})" for reason, rows in skipped.items()
    )


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, lines: TextIO) -> tuple[TraceFormat, Iterator[tuple[str, Row]]]:
    """Return the format of a file and its rows, each with its line."""
    first = lines.readline()
    if first.lstrip().startswith("{"):
        return _MOONCAKE, _json_rows(first, lines)
    columns = [column.strip() for column in next(csv.reader([first]), [])]
    for trace_format in _CSV_FORMATS:
        if trace_format.columns <= set(columns):
            return trace_format, _csv_rows(columns, lines)
    known = "; ".join(f"{one.name}: {', '.join(sorted(one.columns))}" for one in (*_CSV_FORMATS, _MOONCAKE))
    raise TraceError(
        f"{path} has no known trace format: its first line is {first[:80]!r}. Known formats: {known}"
    )


def _csv_rows(columns: list[str], lines: TextIO) -> Iterator[tuple[str, Row]]:
    reader = csv.reader(lines)
    for cells in reader:
        if cells:
            yield f"line {reader.line_num + 1}", dict(zip(columns, cells, strict=False))


def _json_rows(first: str, lines: TextIO) -> Iterator[tuple[str, Row]]:
    """Yield objects by line. A line that is not an object has no columns, and is counted as such."""
    for number, line in enumerate((first, *lines), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield f"line {number}", row if isinstance(row, dict) else {}


def _read(
    trace_format: TraceFormat, rows: Iterator[tuple[str, Row]]
) -> tuple[list[TraceRequest], dict[str, SkippedRows]]:
    requests: list[TraceRequest] = []
    skipped: dict[str, SkippedRows] = {}
    for line, row in rows:
        try:
            requests.append(trace_format.read_row(row))
        except _RowError as exc:
            before = skipped.get(str(exc), SkippedRows(0, line))
            skipped[str(exc)] = SkippedRows(before.count + 1, before.first)
    return requests, skipped


def _azure(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_s=_utc_s(_cell(row, "TIMESTAMP")),
        prompt_tokens=_tokens(row, "ContextTokens"),
        output_tokens=_tokens(row, "GeneratedTokens"),
    )


def _burstgpt(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_s=_seconds(row, "Timestamp"),
        prompt_tokens=_tokens(row, "Request tokens"),
        output_tokens=_tokens(row, "Response tokens"),
    )


def _mooncake(row: Row) -> TraceRequest:
    """Parse a Mooncake row. Captures of this project add a tenant and a class."""
    prefix = row.get("hash_ids", [])
    if not isinstance(prefix, list) or not all(isinstance(block, int) for block in prefix):
        raise _RowError("hash_ids is not a list of integers")
    return TraceRequest(
        arrival_s=_seconds(row, "timestamp") / 1000,
        prompt_tokens=_tokens(row, "input_length"),
        output_tokens=_tokens(row, "output_length"),
        tenant=_tenant(row),
        priority=_priority(row),
        prefix=tuple(prefix),
    )


def _plain(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_s=_seconds(row, "arrival_s"),
        prompt_tokens=_tokens(row, "prompt_tokens"),
        output_tokens=_tokens(row, "output_tokens"),
        tenant=_tenant(row),
        priority=_priority(row),
    )


def _tenant(row: Row) -> str:
    return str(row.get("tenant") or "").strip() or "default"


def _priority(row: Row) -> PriorityClass:
    try:
        return PriorityClass(str(row.get("priority") or PriorityClass.DEFAULT).strip())
    except ValueError as exc:
        raise _RowError("priority is not interactive, default or batch") from exc


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None or value == "":
        raise _RowError(f"no {column}")
    return str(value)


def _seconds(row: Row, column: str) -> float:
    cell = _cell(row, column)
    try:
        seconds = float(cell)
    except ValueError as exc:
        raise _RowError(f"{column} is not a number") from exc
    if not math.isfinite(seconds):
        raise _RowError(f"{column} is not finite")
    return seconds


def _tokens(row: Row, column: str) -> int:
    tokens = _seconds(row, column)
    if tokens != int(tokens):
        raise _RowError(f"{column} is not a whole number")
    if tokens < 1:
        # BurstGPT marks failed requests like this. An engine cannot serve them either.
        raise _RowError(f"{column} is below 1")
    return int(tokens)


def _utc_s(text: str) -> float:
    """Return the Unix time of `2023-11-16 18:17:03.9799600[+00:00]` in seconds, with all its decimals."""
    whole, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(digits) :])
        fraction = float(f"0.{digits}") if dot else 0.0
    except ValueError as exc:
        raise _RowError("TIMESTAMP is not a date and time") from exc
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() + fraction


_MOONCAKE = TraceFormat("mooncake", frozenset({"timestamp", "input_length", "output_length"}), _mooncake)
_CSV_FORMATS = (
    TraceFormat("azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    TraceFormat("burstgpt", frozenset({"Timestamp", "Request tokens", "Response tokens"}), _burstgpt),
    TraceFormat("plain", frozenset({"arrival_s", "prompt_tokens", "output_tokens"}), _plain),
)
