"""A trace: the requests of a workload in the order of arrival, and their provenance.

Transformations of traces (cut, repeat, merge, scale) are recorded in the trace's `source`.

Loaders of public trace formats, which are recognised by a file's first line.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from serve_app.errors import ServeAppError
from serve_app.request import PriorityClass

PREFIX_BLOCK_TOKENS = 512
"""Tokens per id in `TraceRequest.prefix`; Mooncake's block size."""


class TraceError(ServeAppError):
    """A trace cannot be read or generated; the message names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a workload, with its true output length, which no scheduler sees.

    Attributes:
        arrival_s: seconds after the start of the trace.
        output_tokens: true length of the output.
        prefix: ids of the prompt's leading blocks of `PREFIX_BLOCK_TOKENS`; equal ids mean equal text.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """Rows of a file without a valid request: their number, and the line of the first one."""

    count: int
    first: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests by arrival, and their provenance.

    Attributes:
        source: the file, or the figures from which it was generated, with every later change.
        skipped: unreadable rows by reason; None for a generated trace.
        synthetic: names of published traces in it whose files are missing, so that their requests are
            generated.
    """

    name: str
    source: str
    requests: tuple[TraceRequest, ...]
    skipped: Mapping[str, SkippedRows] | None = None
    synthetic: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"trace {self.name!r} ({self.source}) has no request")

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrival rate, `(n - 1) / span`; None if all requests arrive at once."""
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else None

    @property
    def pace(self) -> str:
        """Its rate in words."""
        rate_per_s = self.rate_per_s
        return "at once" if rate_per_s is None else f"at {rate_per_s:.2f} requests/s"

    @property
    def title(self) -> str:
        """Name for a caption, which states if generated lengths replace those of a file."""
        if not self.synthetic:
            return self.name
        parts = "" if self.synthetic == tuple(self.name.split("+")) else f" of {', '.join(self.synthetic)}"
        return f"{self.name} (generated lengths{parts})"

    def provenance(self) -> dict[str, object]:
        """Return what a result file records about its workload."""
        skipped = {reason: rows.count for reason, rows in (self.skipped or {}).items()}
        return {
            "name": self.name,
            "source": self.source,
            "generated_without_file": list(self.synthetic),
            "requests": len(self.requests),
            "rate_per_s": self.rate_per_s,
            "prompt_tokens": sum(request.prompt_tokens for request in self.requests),
            "output_tokens": sum(request.output_tokens for request in self.requests),
            "skipped_rows": skipped,
        }


def take(trace: Trace, count: int, rng: np.random.Generator | None = None) -> Trace:
    """Return `count` consecutive requests, from a position drawn by `rng`, or from the start.

    A trace that is too short is repeated.

    Raises:
        TraceError: `count` is below 1.
    """
    if count < 1:
        raise TraceError(f"a run needs at least one request, got {count}")
    have = len(trace.requests)
    if count > have:
        repeated = _repeated(trace, count)
        return replace(trace, requests=repeated, source=f"{trace.source}, repeated to {count:,} requests")
    start = int(rng.integers(have - count + 1)) if rng is not None else 0
    cut = trace.requests[start : start + count]
    if count == have:
        return trace
    source = f"{trace.source}, requests {start:,} to {start + count - 1:,}"
    return replace(trace, requests=_from_zero(cut), source=source)


def merge(traces: Iterable[Trace], name: str) -> Trace:
    """Merge all requests of several traces on one clock, by arrival. Ties retain the order of traces."""
    merged = list(traces)
    requests = sorted((one for trace in merged for one in trace.requests), key=lambda one: one.arrival_s)
    skipped = {
        f"{trace.name}: {reason}": rows for trace in merged for reason, rows in (trace.skipped or {}).items()
    }
    source = "merged: " + "; ".join(trace.source for trace in merged)
    return Trace(
        name=name,
        source=source,
        requests=tuple(requests),
        skipped=skipped,
        synthetic=tuple(missing for trace in merged for missing in trace.synthetic),
    )


def scale_to_rate(trace: Trace, rate_per_s: float) -> Trace:
    """Scale time so that the mean rate is `rate_per_s`. The pattern of bursts is unchanged.

    Raises:
        TraceError: the rate is not positive, or all requests arrive at once.
    """
    if not 0 < rate_per_s < float("inf"):
        raise TraceError(f"rate must be positive, got {rate_per_s}")
    own_rate_per_s = trace.rate_per_s
    if own_rate_per_s is None:
        raise TraceError(
            f"all {len(trace.requests)} requests of {trace.name!r} "
            "arrive at once, so there is no rate to scale"
        )
    factor = own_rate_per_s / rate_per_s
    requests = tuple(replace(one, arrival_s=one.arrival_s * factor) for one in trace.requests)
    source = f"{trace.source}, scaled from {own_rate_per_s:.4g} to {rate_per_s:.4g} requests/s"
    return replace(trace, requests=requests, source=source)


def _repeated(trace: Trace, count: int) -> tuple[TraceRequest, ...]:
    have = len(trace.requests)
    # One mean gap between two repetitions, so that the boundary is neither a burst nor a pause.
    period_s = trace.span_s + (trace.span_s / (have - 1) if have > 1 else 1.0)
    return tuple(
        replace(
            trace.requests[place % have],
            arrival_s=trace.requests[place % have].arrival_s + place // have * period_s,
        )
        for place in range(count)
    )


def _from_zero(requests: tuple[TraceRequest, ...]) -> tuple[TraceRequest, ...]:
    start_s = requests[0].arrival_s
    return tuple(replace(one, arrival_s=one.arrival_s - start_s) for one in requests)


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
