"""Measured requests in a file: the engine's own timestamps, or a result of `vllm bench serve`.

A file of an engine has one JSON object per line, with `queued_ts`, `scheduled_ts`, `first_token_ts`,
`last_token_ts` (seconds on one clock), `input_toks` and `output_toks`. vLLM records these timestamps for its
metrics. The result of `vllm bench serve --save-result --save-detailed` is one object with a list per figure.
Other keys are ignored.

A client does not see the start of the first step, so the whole TTFT counts as time in the engine, including
the network and the tokenizer.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.errors import ServeAppError


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


class CalibrationError(ServeAppError):
    """The measurements cannot be used for a calibration."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The readable requests of a file.

    Attributes:
        requests: in order of arrival.
        skipped: number of unreadable ones by reason.
        of_client: whether the timestamps are those of a client.
    """

    requests: list[MeasuredRequest] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    of_client: bool = False


def read_measurements(path: Path) -> Measurements:
    """Read a file of measured requests. Unreadable ones are counted by reason.

    Raises:
        CalibrationError: the file is missing, has no readable request, or is a result without details.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    result = _result(text)
    measurements = Measurements(of_client=result is not None)
    rows = filter(str.strip, text.splitlines()) if result is None else _rows(path, result)
    for row in rows:
        try:
            request = _from_engine(row) if isinstance(row, str) else _from_client(row)
        except json.JSONDecodeError:
            measurements.skipped["it is not JSON"] += 1
        except (ValueError, OverflowError) as error:
            measurements.skipped[str(error)] += 1
        else:
            measurements.requests.append(request)
    if not measurements.requests:
        reasons = ", ".join(sorted(measurements.skipped)) or "the file is empty"
        raise CalibrationError(f"{path} has no valid request: {reasons}")
    measurements.requests.sort(key=lambda request: request.queued_at)
    return measurements


def _result(text: str) -> dict[str, Any] | None:
    """Return the result of `vllm bench serve`; None if the text is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "request_throughput" in document else None


_FIGURES = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")


def _rows(path: Path, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    missing = [name for name in _FIGURES if not isinstance(result.get(name), list)]
    if missing:
        raise CalibrationError(
            f"{path} has no {', '.join(missing)}: run `vllm bench serve` with --save-detailed, "
            "of vLLM 0.32 or later"
        )
    for figures in zip(*(result[name] for name in _FIGURES), strict=False):
        yield dict(zip(_FIGURES, figures, strict=True))


def _from_client(row: Mapping[str, Any]) -> MeasuredRequest:
    if row["errors"]:
        raise ValueError("it was not completed")
    gaps_s = row["itls"]
    if not isinstance(gaps_s, list) or not all(isinstance(gap_s, int | float) for gap_s in gaps_s):
        raise ValueError("itls is not a list of numbers")
    sent_at = number(row, "start_times")
    first_token_at = sent_at + number(row, "ttfts")
    return MeasuredRequest(
        queued_at=sent_at,
        scheduled_at=sent_at,
        first_token_at=first_token_at,
        last_token_at=first_token_at + sum(gaps_s),
        prompt_tokens=whole_number(row, "input_lens"),
        output_tokens=whole_number(row, "output_lens"),
    )


def _from_engine(line: str) -> MeasuredRequest:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 - one type for all invalid rows
    return MeasuredRequest(
        queued_at=number(row, "queued_ts"),
        scheduled_at=number(row, "scheduled_ts"),
        first_token_at=number(row, "first_token_ts"),
        last_token_at=number(row, "last_token_ts"),
        prompt_tokens=whole_number(row, "input_toks"),
        output_tokens=whole_number(row, "output_toks"),
    )
