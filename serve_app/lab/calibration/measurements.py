"""Measured requests in a file, one row per request: the engine's own timestamps, or a client's records.

An engine's rows have `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts` (seconds on one clock),
`input_toks` and `output_toks`. vLLM records these timestamps for its metrics. A client's rows are those of
`bench --records`. Other keys are ignored.

A client does not see the start of the first step, so the whole TTFT counts as time in the engine, including
the network and the tokenizer. The gateway's queue time is subtracted if it was reported.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.errors import Outcome, ServeAppError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """One request in the engine; times are seconds on one clock.

    Attributes:
        prompt_tokens: length of its prompt.
        queued_at: entry to the engine's waiting queue.
        scheduled_at: start of its first step.
        first_token_at, last_token_at: generation of those tokens.
    """

    prompt_tokens: int
    output_tokens: int
    queued_at: float
    scheduled_at: float
    first_token_at: float
    last_token_at: float

    def __post_init__(self) -> None:
        instants = (self.queued_at, self.scheduled_at, self.first_token_at, self.last_token_at)
        if not all(math.isfinite(instant) for instant in instants):
            raise ValueError("a timestamp is not finite")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a token count is below 1")
        if list(instants) != sorted(instants) or self.first_token_at == self.queued_at:
            raise ValueError("its timestamps are out of order")
        if self.output_tokens > 1 and self.last_token_at == self.first_token_at:
            raise ValueError("it generated several tokens at the same time")


def number(row: Mapping[str, Any], name: str) -> float:
    """Return a number of a row.

    Raises:
        ValueError: the row has no number of that name.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is missing or not a number")  # noqa: TRY004 - one type for all invalid rows
    return float(value)


def whole_number(row: Mapping[str, Any], name: str) -> int:
    """Return a whole number of a row.

    Raises:
        ValueError: the row has no whole number of that name.
    """
    value = number(row, name)
    if not value.is_integer():
        raise ValueError(f"{name} is not a whole number")
    return int(value)


def is_record(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a client's record, as opposed to an engine's measurement."""
    return "arrived_at" in row and "outcome" in row


def engine_of(row: Mapping[str, Any]) -> str:
    """Return the replica that answered, from the gateway's header; empty without a gateway."""
    return str(row.get("replica") or "")


def from_record(row: Mapping[str, Any]) -> MeasuredRequest:
    """Convert a client's record.

    Raises:
        ValueError: it has no information about the engine's pace; the message is the reason.
    """
    if row["outcome"] != Outcome.COMPLETED:
        raise ValueError("it was not completed")
    if row.get("first_token_at") is None:
        raise ValueError("it has no first token, as without streaming")
    start = next(name for name in ("dispatched_at", "sent_at", "arrived_at") if row.get(name) is not None)
    queued_at = number(row, start)
    return MeasuredRequest(
        prompt_tokens=whole_number(row, "prompt_tokens"),
        output_tokens=whole_number(row, "output_tokens"),
        queued_at=queued_at,
        scheduled_at=queued_at,
        first_token_at=number(row, "first_token_at"),
        last_token_at=number(row, "finished_at"),
    )


class CalibrationError(ServeAppError):
    """The measurements cannot be used for a calibration."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The readable rows of a file.

    Attributes:
        requests: in order of arrival.
        skipped: number of unreadable rows by reason.
        engines: number of readable rows of a client's records, by replica.
    """

    requests: list[MeasuredRequest] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)


def read_measurements(path: Path, replica: str | None = None) -> Measurements:
    """Read a file of measured requests. Unreadable rows are counted by reason.

    Args:
        replica: use only a client's records of this replica; None for all, which must be of one replica.

    Raises:
        CalibrationError: the file is missing, has no readable row, or has rows of several engines.
    """
    measurements = Measurements()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    _read_row(line, replica, measurements)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    _check_engines(path, replica, measurements.engines)
    if not measurements.requests:
        reasons = ", ".join(sorted(measurements.skipped)) or "the file is empty"
        raise CalibrationError(f"{path} has no valid request: {reasons}")
    measurements.requests.sort(key=lambda request: request.queued_at)
    return measurements


def _check_engines(path: Path, replica: str | None, engines: Counter[str]) -> None:
    """Raise for requests of several engines, because no single engine explains their timings."""
    named = ", ".join(f"{name or 'unnamed'} ({count:,} requests)" for name, count in engines.most_common())
    if replica is not None and replica not in engines:
        raise CalibrationError(f"{path} has no requests of replica {replica!r}, only of {named or 'none'}")
    if replica is None and len(engines) > 1:
        raise CalibrationError(
            f"{path} has requests of {len(engines)} replicas, but a profile describes "
            f"one: choose one with --replica: {named}"
        )


def _read_row(line: str, replica: str | None, into: Measurements) -> None:
    try:
        row = _object(line)
        request = from_record(row) if is_record(row) else _from_engine(row)
    except json.JSONDecodeError:
        into.skipped["it is not JSON"] += 1
        return
    except (ValueError, OverflowError) as error:
        into.skipped[str(error)] += 1
        return
    if is_record(row):
        into.engines[engine_of(row)] += 1
    if replica is None or engine_of(row) == replica:
        into.requests.append(request)


def _object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - one type for all invalid rows
    return row


def _from_engine(row: Mapping[str, Any]) -> MeasuredRequest:
    return MeasuredRequest(
        queued_at=number(row, "queued_ts"),
        scheduled_at=number(row, "scheduled_ts"),
        first_token_at=number(row, "first_token_ts"),
        last_token_at=number(row, "last_token_ts"),
        prompt_tokens=whole_number(row, "input_toks"),
        output_tokens=whole_number(row, "output_toks"),
    )
