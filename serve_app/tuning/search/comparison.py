"""Is a candidate better than what is in force, or was it lucky? Paired differences over the same windows.

Both meet the same requests at the same times, so what a window has of good or bad luck cancels out, and the
interval is of the difference. Student's t at 95 %, two-sided; a candidate wins when the lower bound is above
zero, which at worst one in forty candidates that are no better does.

Windows are drawn from one stretch of traffic. More windows than that stretch amounts to say ever more exactly
what is better *on it*, but not on the next: so the standard error never goes below that of as many windows as
the traffic is long (bootstrap of m out of n).
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.metrics.confidence import t_95


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidate less incumbent, in rewards.

    Attributes:
        mean: over the windows that both have a reward for; 0 without any.
        low, high: the 95 % interval; None when it takes more windows.
        windows: how many both have a reward for.
        missing: how many one of them has none for.
    """

    mean: float
    low: float | None
    high: float | None
    windows: int
    missing: int = 0

    @property
    def is_win(self) -> bool:
        """Whether the candidate is better with confidence. Where a reward is missing, nobody wins."""
        return self.low is not None and self.low > 0 and not self.missing

    @property
    def is_loss(self) -> bool:
        """Whether the candidate is worse with confidence."""
        return self.high is not None and self.high < 0

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


def compare(
    candidate: Mapping[int, float | None],
    incumbent: Mapping[int, float | None],
    *,
    independent_windows: float = math.inf,
) -> Comparison:
    """The paired difference over the windows of the candidate.

    Args:
        candidate, incumbent: rewards by window; None, or not finite, where there is none.
        independent_windows: how many windows the traffic amounts to that they were drawn from; at least 1.
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
