"""Measured requests in a file, one row per request: the engine's own timestamps, or a client's records.

An engine's rows have `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts` (seconds on one clock),
`input_toks` and `output_toks`. vLLM takes these timestamps for its metrics. A client's rows are those of
`bench --records`. Other keys are ignored.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.calibration.measurement import MeasuredRequest, number, whole_number
from serve_app.calibration.records import engine_of, from_record, is_record
from serve_app.errors import ServeAppError


class CalibrationError(ServeAppError):
    """The measurements cannot be used for a calibration."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The readable rows of a file.

    Attributes:
        requests: in order of arrival.
        skipped: rows that could not be read, counted by reason.
        engines: readable rows of a client's records, counted by the replica that answered.
    """

    requests: list[MeasuredRequest] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)


def read_measurements(path: Path, replica: str | None = None) -> Measurements:
    """Read a file of measured requests; unreadable rows are counted by reason.

    Args:
        replica: of a client's records, those that it answered; None takes all, which must be of one replica.

    Raises:
        CalibrationError: there is no such file, no row of it can be read, or its rows are of several engines.
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
        raise CalibrationError(f"{path} holds no readable request: {reasons}")
    measurements.requests.sort(key=lambda request: request.queued_at)
    return measurements


def _check_engines(path: Path, replica: str | None, engines: Counter[str]) -> None:
    """Requests of several engines did not compete, so no one engine explains their timings."""
    named = ", ".join(f"{name or 'no name'} ({count:,} requests)" for name, count in engines.most_common())
    if replica is not None and replica not in engines:
        raise CalibrationError(f"{path} has no requests of replica {replica!r}, but of {named or 'none'}")
    if replica is None and len(engines) > 1:
        raise CalibrationError(
            f"{path} has requests of {len(engines)} replicas, and a profile is of one: "
            f"choose with --replica one of {named}"
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
        raise ValueError("it is not an object")  # noqa: TRY004 - every fault of a row is counted the same way
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
