"""Student-t confidence intervals (95 %) of figures measured over a few seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# Two-sided 95 % points of Student's t by degrees of freedom, 1 to 30, from a table of the distribution.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A mean over `n` runs and its 95 % interval. The bounds are None for a single run."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def as_json(self) -> dict[str, float | int | None]:
        """Return the fields by name."""
        return asdict(self)

    def as_text(self, decimals: int, scale: float = 1.0) -> str:
        """Return `mean ± half the width`, both times `scale`, or the mean alone for a single run."""
        mean = f"{scale * self.mean:,.{decimals}f}"
        return mean if self.high is None else f"{mean} ± {scale * (self.high - self.mean):,.{decimals}f}"


def interval_95(values: Sequence[float]) -> ConfidenceInterval:
    """Return the mean of one figure over seeds with its 95 % Student-t interval."""
    if not values:
        raise ValueError("an interval needs at least one value, got none: run at least one seed")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return ConfidenceInterval(mean, None, None, 1)
    half = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(mean, mean - half, mean + half, len(values))


def t_95(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % point of Student's t; beyond the table by its series (error < 0.001)."""
    if degrees_of_freedom < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees_of_freedom}")
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    return _NORMAL_95 + (_NORMAL_95**3 + _NORMAL_95) / (4 * degrees_of_freedom)
