"""One measured request, and the numbers of a row that it is read from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


def number(row: Mapping[str, Any], name: str) -> float:
    """A number of a row.

    Raises:
        ValueError: it has none of that name.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is missing or no number")  # noqa: TRY004 - faults of rows are counted alike
    return float(value)


def whole_number(row: Mapping[str, Any], name: str) -> int:
    """A whole number of a row.

    Raises:
        ValueError: it has none of that name.
    """
    value = number(row, name)
    if not value.is_integer():
        raise ValueError(f"{name} is no whole number")
    return int(value)
