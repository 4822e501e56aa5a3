"""Workloads: traces from files and generators, for simulator, planner and load tests.

- `Trace`: requests by arrival, and their provenance. Transformations (cut, repeat, merge, scale) are recorded
  in its `source`.
- `load_trace`: reads public trace formats, which are recognised by a file's first line.
- `resolve`: finds a workload by its name or path.
- `Recipe`: a generator of a named workload, composed of lengths, arrivals, tenants and priority classes.
- `gateway_blocks`, `engine_blocks`: hashes of prompt blocks, computed from the block ids of a trace.
- `stream`: the random numbers of one use.

`load_trace`. The formats:

    azure      TIMESTAMP,ContextTokens,GeneratedTokens       Azure 2023 and 2024; timestamps of seven decimals
    burstgpt   Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    mooncake   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} per line
    plain      arrival_s,prompt_tokens,output_tokens[,tenant][,priority]

A row without a valid request is counted by reason, with the line of the first one, and never dropped
silently. Arrivals are shifted so that the first is at 0, and sorted (stable).

`Recipe`. Generators are built from published figures, for use if the traces themselves are not available:

Azure 2023: percentiles of lengths, and gaps, computed from the two public traces (Azure/AzurePublicDataset,
CC-BY 4.0). Prompt and output are drawn independently, so their correlation is lost.
LMSYS-Chat-1M: the distribution of total tokens (vllm-project/semantic-router, fleet-sim, Apache-2.0) and
percentiles of outputs.
`paper-mix`: the workload of EWSJF (arXiv 2601.21758, section 5): 80 % short and 20 % long prompts, Poisson
arrivals.

`gateway_blocks`. A trace names the leading blocks of a prompt by ids; equal ids mean equal text up to the end
of their block. Gateways and engines hash blocks of other sizes, so their hashes are derived from these ids.

`stream`. A run has one seed and one named stream of random numbers per use, so that drawing more numbers for
one use does not change any other.
"""

import csv
import gzip
import json
import math
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from serve_app.core.routing.prefix import BLOCK_ENDS
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


def gateway_blocks(ids: Sequence[int], block_tokens: int, prompt_tokens: int) -> Iterator[int]:
    """Yield hashes of a prompt's blocks as a gateway computes them.

    Args:
        ids: ids of the prompt's leading blocks of `block_tokens`.
    """
    known_tokens = min(prompt_tokens, len(ids) * block_tokens)
    for place, end in enumerate(takewhile(lambda end: end <= known_tokens, BLOCK_ENDS)):
        yield ids[(end - 1) // block_tokens] * len(BLOCK_ENDS) + place


def engine_blocks(ids: Sequence[int], block_tokens: int, tokens: int, block_size: int) -> Iterator[int]:
    """Yield hashes of an engine's full blocks among the first `tokens`. One id may cover several of them."""
    per_id = block_tokens // block_size
    if per_id == 1:
        yield from ids[: tokens // block_size]
        return
    for place in range(min(len(ids) * per_id, tokens // block_size)):
        yield ids[place // per_id] * per_id + place % per_id


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the numpy generator of one use (`arrivals`, `lengths`...) in the run with this seed."""
    return np.random.default_rng(_entropy(seed, name))


def plain_stream(seed: int, name: str) -> random.Random:
    """Return a stream as `random.Random`, for the pure packages, which do not import numpy."""
    return random.Random(int(stream(seed, name).integers(1 << 62)))  # noqa: S311 - a simulation, not a secret


def _entropy(seed: int, name: str) -> list[int]:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return [seed, zlib.crc32(name.encode())]


Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """Distribution of lengths in tokens, each at least 1."""

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw `count` lengths."""
        ...


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Lengths whose distribution is known at a few points, interpolated linearly in between.

    Attributes:
        points: (share of requests at most this long, tokens), both ascending, from share 0 to share 1.
    """

    points: tuple[tuple[float, float], ...]

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Invert the distribution function at uniform shares."""
        shares, tokens = zip(*self.points, strict=True)
        return _whole(np.interp(rng.random(count), shares, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Lengths around `mean`, skewed to the right, cut at `max_tokens`."""

    mean: float
    cv: float
    max_tokens: int

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw from the lognormal distribution of this mean and coefficient of variation."""
        variance = math.log(1 + self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return _whole(np.minimum(drawn, self.max_tokens))


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniform lengths from `low` to `high`, both included."""

    low: int
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw whole numbers."""
        return rng.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Several kinds of lengths, each with its share of the requests."""

    parts: tuple[tuple[float, Lengths], ...]

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Choose a part for each request, then draw from it."""
        chosen = rng.choice(len(self.parts), count, p=[share for share, _ in self.parts])
        drawn = np.empty(count, dtype=np.int64)
        for index, (_, lengths) in enumerate(self.parts):
            of_part = chosen == index
            drawn[of_part] = lengths.sample(int(of_part.sum()), rng)
        return drawn


def pair_within_totals(totals: Tokens, outputs: Tokens, rng: np.random.Generator) -> Tokens:
    """Give each total a shorter output at random, so that both retain their distributions.

    Drawing the two independently and cutting would distort one of them. Totals are paired in ascending order,
    each with one of the outputs that fit. If none fits, which is rare, the output is 1.
    """
    paired = np.ones_like(totals)
    ascending = np.sort(outputs)
    fitting: list[int] = []
    taken = 0
    for place in np.argsort(totals, kind="stable"):
        while taken < len(ascending) and ascending[taken] < totals[place]:
            fitting.append(int(ascending[taken]))
            taken += 1
        if fitting:
            drawn = int(rng.integers(len(fitting)))
            paired[place], fitting[drawn] = fitting[drawn], fitting[-1]
            fitting.pop()
    return paired


def _whole(lengths: Sequence[float] | NDArray[np.float64]) -> Tokens:
    return np.asarray(np.maximum(1, np.rint(lengths)), dtype=np.int64)


class Arrivals(Protocol):
    """Distribution of arrival times in seconds, ascending, after a start at 0."""

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw `count` arrival times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Independent gaps of a gamma distribution.

    A coefficient of variation (`cv`) of 1 is Poisson, more is bursty. Production traffic to large models has
    3.5 to 12 (ServeGen, Alibaba), one service as a whole about 1.1.
    """

    rate_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, cv=self.cv)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times: sums of gaps of shape `1 / cv^2` and mean `1 / rate`."""
        variance_ratio = self.cv**2
        gaps = rng.gamma(1 / variance_ratio, variance_ratio / self.rate_per_s, count)
        return np.asarray(np.cumsum(gaps), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals:
    """Poisson arrivals in on-periods, none in off-periods; both have exponential durations.

    Attributes:
        rate_per_s: mean over on- and off-periods together.
        on_s: mean length of an on-period.
        off_s: mean length of an off-period.
    """

    rate_per_s: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, on_s=self.on_s, off_s=self.off_s)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrivals on a clock that runs in on-periods only, then insert the off-periods."""
        on_rate_per_s = self.rate_per_s * (self.on_s + self.off_s) / self.on_s
        on_clock = np.cumsum(rng.exponential(1 / on_rate_per_s, count))
        period_ends: list[float] = []
        ends_at = rng.exponential(self.on_s)
        while count and ends_at <= on_clock[-1]:
            period_ends.append(ends_at)
            ends_at += rng.exponential(self.on_s)
        off_s = np.concatenate(([0.0], np.cumsum(rng.exponential(self.off_s, len(period_ends)))))
        off_periods_before = np.searchsorted(np.asarray(period_ends), on_clock, side="right")
        return np.asarray(on_clock + off_s[off_periods_before], dtype=np.float64)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")


ZIPF_EXPONENT = 1.0
"""The first of ten tenants then sends 34 % of requests, within the 16 to 52 % of production (ServeGen)."""
_MAX_TENANTS, _MAX_EXPONENT = 100_000, 10


def zipf_shares(count: int, exponent: float = ZIPF_EXPONENT) -> dict[str, float]:
    """Return shares of `tenant-1` to `tenant-n`, proportional to `1 / rank^exponent`; 0 makes them equal."""
    if not 1 <= count <= _MAX_TENANTS or not 0 <= exponent <= _MAX_EXPONENT:
        raise TraceError(
            f"tenants need a count from 1 to {_MAX_TENANTS:,} and an exponent from 0 to {_MAX_EXPONENT}, got "
            f"{count}:{exponent}"
        )
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return {f"tenant-{rank}": weight / total for rank, weight in enumerate(weights, start=1)}


def parse_shares(text: str) -> dict[str, float]:
    """Parse `8` (Zipf), `8:1.2` (with an exponent) or `search=3,chat=1` (named, by weight).

    Raises:
        TraceError: the text is none of these.
    """
    try:
        if "=" not in text:
            count, _, exponent = text.partition(":")
            return zipf_shares(int(count), float(exponent or ZIPF_EXPONENT))
        pairs = [part.partition("=") for part in text.split(",")]
        weights = {name.strip(): float(weight) for name, _, weight in pairs}
    except ValueError as exc:
        raise TraceError(f"cannot parse shares {text!r}: use 8, 8:1.2 or search=3,chat=1") from exc
    if "" in weights or not all(0 < weight < float("inf") for weight in weights.values()):
        raise TraceError(f"shares need a name and a positive weight each, got {text!r}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def assign_tenants(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Assign a tenant to each request, drawn by share."""
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(trace, requests=tuple(replace(request, tenant=name) for request, name in requests))


def assign_priorities(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Assign a priority class to each request, drawn by share.

    Raises:
        TraceError: a name is not a priority class.
    """
    unknown = set(shares) - set(PriorityClass)
    if unknown:
        raise TraceError(f"no priority class {', '.join(sorted(unknown))}: use {', '.join(PriorityClass)}")
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(
        trace, requests=tuple(replace(request, priority=PriorityClass(name)) for request, name in requests)
    )


def _drawn(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> list[str]:
    """Return a name for each request, drawn by share."""
    drawn = rng.choice(list(shares), len(trace.requests), p=list(shares.values()))
    return [str(name) for name in drawn]


LengthPairs = tuple[Tokens, Tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Generator of a named workload.

    Attributes:
        figures: the figures that it is built from, for the provenance of results.
        rate_per_s: mean arrival rate.
        arrivals: returns the arrival process for a mean rate.
        lengths: draws prompt and output lengths.
    """

    figures: str
    rate_per_s: float
    arrivals: Callable[[float], Arrivals]
    lengths: Callable[[int, np.random.Generator], LengthPairs]

    def generate(self, name: str, count: int, seed: int) -> Trace:
        """Draw `count` requests. Arrivals and lengths use separate streams."""
        times = self.arrivals(self.rate_per_s).sample(count, stream(seed, f"{name} arrivals"))
        prompts, outputs = self.lengths(count, stream(seed, f"{name} lengths"))
        return Trace(
            name=name,
            source=f"generated from {self.figures} at {self.rate_per_s:.4g} requests/s, seed {seed}",
            requests=tuple(
                TraceRequest(arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(output))
                for at, prompt, output in zip(times, prompts, outputs, strict=True)
            ),
        )


def _independent(prompts: Lengths, outputs: Lengths) -> Callable[[int, np.random.Generator], LengthPairs]:
    def draw(count: int, rng: np.random.Generator) -> LengthPairs:
        return prompts.sample(count, rng), outputs.sample(count, rng)

    return draw


def _within(totals: Lengths, outputs: Lengths) -> Callable[[int, np.random.Generator], LengthPairs]:
    def draw(count: int, rng: np.random.Generator) -> LengthPairs:
        total = totals.sample(count, rng)
        output = pair_within_totals(total, outputs.sample(count, rng), rng)
        return np.maximum(1, total - output), output

    return draw


def _percentiles(*tokens: int) -> QuantileLengths:
    """Return a distribution from its percentiles 0, 1, 5, 10, 25, 50, 75, 80, 90, 95, 99, 99.9 and 100."""
    return QuantileLengths(tuple(zip(_SHARES, tokens, strict=True)))


_SHARES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 0.99, 0.999, 1)

# (share of requests, maximum tokens of prompt and output together).
_LMSYS_TOTALS = QuantileLengths(
    (
        *((0.0, 2), (0.1314, 64), (0.2359, 128), (0.3825, 256), (0.6383, 512), (0.7580, 768), (0.8307, 1024)),
        *((0.9089, 1536), (0.9483, 2048), (0.9729, 3072), (0.9837, 4096), (0.9929, 6144), (0.9965, 8192)),
        *((0.99863, 12288), (0.99926, 16384), (0.99966, 24576), (0.99979, 32768), (1.0, 65536)),
    )
)
_LMSYS_OUTPUTS = QuantileLengths(
    ((0, 1), (0.5, 140), (0.8, 325), (0.9, 397), (0.95, 447), (0.99, 502), (1, 512))
)

RECIPES: dict[str, Recipe] = {
    "azure-code": Recipe(
        figures="percentiles of the Azure 2023 code trace",
        rate_per_s=2.57,
        # These periods leave about 12 minutes of 58 without arrivals and a cv of about 13, as in the trace.
        # At other rates they scale as the trace itself would.
        arrivals=lambda rate: OnOffArrivals(rate_per_s=rate, on_s=92 * 2.57 / rate, off_s=75 * 2.57 / rate),
        lengths=_independent(
            _percentiles(3, 17, 75, 147, 578, 1469, 2744, 3192, 5188, 7303, 7436, 7437, 7437),
            _percentiles(6, 6, 6, 7, 9, 13, 24, 29, 55, 90, 251, 825, 1899),
        ),
    ),
    "azure-conv": Recipe(
        figures="percentiles of the Azure 2023 conversation trace",
        rate_per_s=5.53,
        arrivals=lambda rate: GammaArrivals(rate_per_s=rate, cv=1.09),
        lengths=_independent(
            _percentiles(2, 29, 181, 207, 396, 1020, 1189, 1315, 2734, 4083, 4142, 6179, 14050),
            _percentiles(7, 16, 41, 54, 85, 129, 395, 400, 424, 451, 601, 954, 1000),
        ),
    ),
    "lmsys": Recipe(
        figures="the token distribution of LMSYS-Chat-1M",
        # The data set has no arrival times, so a Poisson stream of this rate is assumed.
        rate_per_s=10.0,
        arrivals=lambda rate: GammaArrivals(rate_per_s=rate),
        lengths=_within(_LMSYS_TOTALS, _LMSYS_OUTPUTS),
    ),
    "paper-mix": Recipe(
        figures="the mix of the EWSJF paper (80 % of 32-256, 20 % of 1,024-4,096, outputs around 100)",
        rate_per_s=20.0,
        arrivals=lambda rate: GammaArrivals(rate_per_s=rate),
        lengths=_independent(
            MixedLengths(((0.8, UniformLengths(32, 256)), (0.2, UniformLengths(1024, 4096)))),
            LognormalLengths(mean=100, cv=0.5, max_tokens=512),
        ),
    ),
}


TRACES_VARIABLE = "EWSJF_TRACES"
"""Environment variable with the folder of trace files."""

_ROOT = Path(__file__).resolve().parents[2]
DOWNLOAD_FOLDER = _ROOT / ".cache" / "traces"
"""Default folder of `scripts/fetch_traces`."""
_SHARED_FOLDER = _ROOT.parent / "shared" / "traces"

_FILES = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
}
_DEFAULT_REQUESTS = 1000
# Merged generators cover an hour, like the public traces.
_MERGED_SPAN_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """Choice of a trace, and its modifications.

    Attributes:
        name: a name (`azure-code`, `azure-conv`, `lmsys`, `paper-mix`) or the path of a trace file; several
            joined by `+` are merged on one clock.
        requests: number of requests; None for all of a file, or the generator's default.
        tenants: see `parse_shares`; None for those of the file.
        priorities: shares of priority classes, such as `interactive=1,batch=3`; None for those of the file.
        folder: folder of trace files; None for the default folders.
        arrivals: pattern that replaces the trace's own, see `lab.simulation.run.with_arrivals`.
        change: returns the modified trace of a seed, before the pattern of arrivals is applied. It must be
            hashable, and possible to send to other processes.
    """

    name: str
    requests: int | None = None
    tenants: str | None = None
    priorities: str | None = None
    folder: Path | None = None
    arrivals: str | None = None
    change: Callable[[Trace, int], Trace] | None = None


def resolve(choice: TraceChoice, seed: int) -> Trace:
    """Read or generate the requests of one seed, cut to size, with their tenants and priorities.

    `change` and `arrivals` are not applied.

    Raises:
        TraceError: there is no such name or file, it cannot be read, or a number is out of range.
    """
    if choice.requests is not None and choice.requests < 1:
        raise TraceError(f"requests must be positive, got {choice.requests}")
    if seed < 0:
        raise TraceError(f"seed must not be negative, got {seed}")
    is_one = Path(choice.name).is_file() or "+" not in choice.name
    trace = _single(choice, seed) if is_one else _merged(choice, seed)
    if choice.tenants is not None:
        trace = assign_tenants(trace, parse_shares(choice.tenants), stream(seed, "tenants"))
    if choice.priorities is not None:
        trace = assign_priorities(trace, parse_shares(choice.priorities), stream(seed, "priorities"))
    return trace


def _single(choice: TraceChoice, seed: int) -> Trace:
    path = trace_file(choice.name, choice.folder)
    if path is None:
        trace = RECIPES[choice.name].generate(choice.name, choice.requests or _DEFAULT_REQUESTS, seed)
        return replace(trace, synthetic=(choice.name,)) if choice.name in _FILES else trace
    trace = load_trace(path)
    if choice.name in _FILES:
        trace = replace(trace, name=choice.name)
    return _sized(trace, choice, seed)


def _merged(choice: TraceChoice, seed: int) -> Trace:
    """Merge whole files, in which requests that arrived together stay together, and an hour of generators."""
    parts = []
    for name in choice.name.split("+"):
        is_generated = trace_file(name, choice.folder) is None
        requests = round(RECIPES[name].rate_per_s * _MERGED_SPAN_S) if is_generated else None
        parts.append(_single(replace(choice, name=name, requests=requests), seed))
    return _sized(merge(parts, choice.name), choice, seed)


def _sized(trace: Trace, choice: TraceChoice, seed: int) -> Trace:
    return take(trace, choice.requests or len(trace.requests), stream(seed, "window"))


def notes_on(trace: Trace) -> Iterator[str]:
    """Yield notes about the requests that are played: generated ones, skipped rows."""
    if names := trace.synthetic:
        files = "its file is missing" if len(names) == 1 else "their files are missing"
        yield (
            f"{' and '.join(names)}: {files}, so lengths and arrivals are generated from published "
            "percentiles; scripts/fetch_traces downloads the traces"
        )
    if skipped := describe_skipped(trace):
        yield f"{trace.name}: {skipped}"


def trace_file(name: str, folder: Path | None = None) -> Path | None:
    """Return the file of a trace, or None if it is generated.

    Raises:
        TraceError: there is no such name or file.
    """
    if name in _FILES:
        return find_file(_FILES[name], folder)
    if name in RECIPES:
        return None
    path = Path(name)
    if not path.is_file():
        raise TraceError(f"no trace {name!r}: use a file, or one of {', '.join(RECIPES)}")
    return path


def find_file(filename: str, folder: Path | None = None) -> Path | None:
    """Return the file, or None. A folder that was given must have it; the default folders may have it."""
    named = folder or (Path(os.environ[TRACES_VARIABLE]) if os.environ.get(TRACES_VARIABLE) else None)
    if named is not None:
        if not (named / filename).is_file():
            raise TraceError(f"no {filename} in {named}: run scripts/fetch_traces --out {named}")
        return named / filename
    candidates = (place / filename for place in (DOWNLOAD_FOLDER, _SHARED_FOLDER))
    return next((path for path in candidates if path.is_file()), None)
