"""Mean, percentiles and maximum of a sample: the five figures of every report."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """Five figures of a sample; all None when it is empty."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """The figures of `values`, in any order."""
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None, None, None)
        return cls(
            math.fsum(ordered) / len(ordered),
            percentile(ordered, 50),
            percentile(ordered, 95),
            percentile(ordered, 99),
            ordered[-1],
        )

    def as_json(self) -> dict[str, float | None]:
        """The figures by name."""
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of an ascending sample lie, interpolated between neighbours.

    The position is `(n - 1) * percent / 100`, numpy's default, so that figures agree with other tools.

    Raises:
        ValueError: the sample is empty, or `percent` is outside 0 to 100.
    """
    if not ordered:
        raise ValueError("percentile of an empty sample: check for records before asking")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be within 0 and 100, got {percent}")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
