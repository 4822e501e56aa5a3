"""The paired comparison of a candidate with the incumbent over the same windows.

Both meet the same requests at the same times, so the luck of a window cancels out of the difference. The
interval of the mean difference is Student's t at 95 %, two-sided. A candidate wins when the lower bound is
above zero. At worst one in forty candidates that are no better does so by chance.

All windows are drawn from the same minutes of traffic. Drawing more of them tells ever more exactly what is
better on *those* minutes, but not on the next. So the standard error never goes below that of as many windows
as the traffic is long (bootstrap of m out of n).
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.metrics.confidence import t_95


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidate less incumbent, in rewards.

    Attributes:
        mean: over the windows in which both have a reward; 0 without any.
        low, high: the 95 % interval; None with fewer than two windows.
        windows: in which both have a reward.
        missing: windows in which one of them has none.
    """

    mean: float
    low: float | None
    high: float | None
    windows: int
    missing: int = 0

    @property
    def is_win(self) -> bool:
        """Whether the candidate is better with confidence; never when a reward is missing."""
        return self.low is not None and self.low > 0 and not self.missing


def compare(
    candidate: Mapping[int, float | None],
    incumbent: Mapping[int, float | None],
    *,
    independent_windows: float = math.inf,
) -> Comparison:
    """The paired difference over the windows of the candidate.

    Args:
        candidate, incumbent: rewards by window; None, or not finite, where there is none.
        independent_windows: length of the traffic that they were drawn from, in windows; at least 1.
    """
    differences = []
    for window, reward in candidate.items():
        other = incumbent.get(window)
        if reward is not None and other is not None and math.isfinite(reward - other):
            differences.append(reward - other)
    count, missing = len(differences), len(candidate) - len(differences)
    if not differences:
        return Comparison(mean=0.0, low=None, high=None, windows=0, missing=missing)
    mean = statistics.fmean(differences)
    if count < 2:
        return Comparison(mean=mean, low=None, high=None, windows=count, missing=missing)
    independent = min(float(count), max(1.0, independent_windows))
    half = t_95(count - 1) * statistics.stdev(differences) / math.sqrt(independent)
    return Comparison(mean=mean, low=mean - half, high=mean + half, windows=count, missing=missing)
