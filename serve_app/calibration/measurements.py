"""Measured requests: one row per request, with the timestamps of the engine itself.

A file holds one JSON object per line, with `queued_ts`, `scheduled_ts`, `first_token_ts`, `last_token_ts`
(seconds on one clock), `input_toks` and `output_toks`. vLLM takes these timestamps for its metrics. Other
keys are ignored.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.errors import ServeAppError

_INSTANTS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
_COUNTS = ("input_toks", "output_toks")


class CalibrationError(ServeAppError):
    """The measurements cannot be used for a calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """One request in the engine; times are seconds on one clock.

    Attributes:
        prompt_tokens: length of its prompt.
        output_tokens: generated tokens.
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
            raise ValueError("an instant is not finite")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a token count is below 1")
        if list(instants) != sorted(instants) or self.first_token_at == self.queued_at:
            raise ValueError("its instants are out of order")
        if self.output_tokens > 1 and self.last_token_at == self.first_token_at:
            raise ValueError("it generated several tokens in no time")


@dataclass(frozen=True, slots=True)
class Measurements:
    """The readable rows of a file.

    Attributes:
        requests: in order of arrival.
        skipped: rows that could not be read, counted by reason.
    """

    requests: list[MeasuredRequest]
    skipped: Counter[str] = field(default_factory=Counter)


def read_measurements(path: Path) -> Measurements:
    """Read a file of measured requests; unreadable rows are counted by reason.

    Raises:
        CalibrationError: the file does not exist, or no row of it can be read.
    """
    measurements = Measurements([])
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    _read_row(line, measurements)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    if not measurements.requests:
        reasons = ", ".join(sorted(measurements.skipped)) or "the file is empty"
        raise CalibrationError(f"{path} holds no readable request: {reasons}")
    measurements.requests.sort(key=lambda request: request.queued_at)
    return measurements


def _read_row(line: str, into: Measurements) -> None:
    try:
        into.requests.append(_request(json.loads(line)))
    except json.JSONDecodeError:
        into.skipped["it is not JSON"] += 1
    except (ValueError, OverflowError) as error:
        into.skipped[str(error)] += 1


def _request(row: Any) -> MeasuredRequest:
    if not isinstance(row, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - every fault of a row is counted the same way
    for name in (*_INSTANTS, *_COUNTS):
        if isinstance(row.get(name), bool) or not isinstance(row.get(name), (int, float)):
            raise ValueError(f"{name} is missing or no number")  # noqa: TRY004 - as above
    for name in _COUNTS:
        if not float(row[name]).is_integer():
            raise ValueError(f"{name} is no whole number")
    queued_at, scheduled_at, first_token_at, last_token_at = (float(row[name]) for name in _INSTANTS)
    return MeasuredRequest(
        prompt_tokens=int(row["input_toks"]),
        output_tokens=int(row["output_toks"]),
        queued_at=queued_at,
        scheduled_at=scheduled_at,
        first_token_at=first_token_at,
        last_token_at=last_token_at,
    )
