"""Numbers within the bounds of a JSON schema."""

import math
import random
from fractions import Fraction
from typing import Any

# Width of the range where the schema leaves a side open.
_OPEN_RANGE = 100
_DECIMALS = 2


class NoNumberError(ValueError):
    """Bounds that no number meets."""


def number(schema: dict[str, Any], rng: random.Random, *, integral: bool) -> int | float:
    """A number that meets the schema.

    Raises:
        NoNumberError: the bounds exclude all numbers.
    """
    low, high = _bounds(schema)
    step = _step(schema, integral=integral)
    if step is not None:
        return _multiple(low, high, step, rng)
    least, most = _closed(low, high)
    value = round(rng.uniform(float(least), float(most)), _DECIMALS)
    if least < Fraction(value) < most:
        return value
    # A narrow range, or an end of it that may be excluded: its middle is inside.
    return float((least + most) / 2)


def _bounds(schema: dict[str, Any]) -> tuple[tuple[Fraction, bool] | None, tuple[Fraction, bool] | None]:
    """The lower and the upper bound, each with whether it is excluded; None where there is none."""
    lows = _limits(schema, "minimum", "exclusiveMinimum")
    highs = _limits(schema, "maximum", "exclusiveMaximum")
    low = max(lows, default=None)
    high = min(((value, not excluded) for value, excluded in highs), default=None)
    return low, None if high is None else (high[0], not high[1])


def _limits(schema: dict[str, Any], name: str, exclusive: str) -> list[tuple[Fraction, bool]]:
    found = []
    if isinstance(schema.get(name), (int, float)):
        # In draft 4 the exclusive keyword is a flag of the other one.
        found.append((Fraction(schema[name]), schema.get(exclusive) is True))
    if isinstance(schema.get(exclusive), (int, float)) and not isinstance(schema[exclusive], bool):
        found.append((Fraction(schema[exclusive]), True))
    return found


def _step(schema: dict[str, Any], *, integral: bool) -> Fraction | None:
    steps = [Fraction(1)] if integral else []
    if isinstance(schema.get("multipleOf"), (int, float)):
        # As written: the nearest fraction of a float would not be what the schema's author meant.
        steps.append(Fraction(str(schema["multipleOf"])))
    if not steps:
        return None
    if len(steps) == 1:
        return steps[0]
    # The least common multiple of two fractions.
    first, second = steps
    return Fraction(
        math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator)
    )


def _multiple(
    low: tuple[Fraction, bool] | None, high: tuple[Fraction, bool] | None, step: Fraction, rng: random.Random
) -> int | float:
    least = None if low is None else math.floor(low[0] / step) + 1 if low[1] else math.ceil(low[0] / step)
    most = None if high is None else math.ceil(high[0] / step) - 1 if high[1] else math.floor(high[0] / step)
    if least is None:
        least = 0 if most is None or most >= 0 else most - _OPEN_RANGE
    if most is None:
        most = least + _OPEN_RANGE
    if least > most:
        raise NoNumberError("the bounds exclude every number")
    value = rng.randint(least, most) * step
    return int(value) if value.denominator == 1 else float(value)


def _closed(
    low: tuple[Fraction, bool] | None, high: tuple[Fraction, bool] | None
) -> tuple[Fraction, Fraction]:
    if low is None and high is None:
        return Fraction(0), Fraction(_OPEN_RANGE)
    if low is None:
        assert high is not None
        return min(Fraction(0), high[0] - _OPEN_RANGE), high[0]
    if high is None:
        return low[0], low[0] + _OPEN_RANGE
    if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
        raise NoNumberError("the bounds exclude every number")
    return low[0], high[0]
