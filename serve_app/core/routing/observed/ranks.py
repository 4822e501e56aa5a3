"""The rank test of Mann and Whitney (1947): are the values of one sample larger than those of another?

It works for any distribution, so a rare outlier or a wide spread is no evidence. Values of several kinds are
compared within each kind, and the results added, as by van Elteren (1960).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import TypeVar

Kind = TypeVar("Kind")


def rank_surplus(larger: Collection[float], smaller: Collection[float]) -> tuple[float, float]:
    """Return by how much the rank sum of one sample exceeds that of equal distributions, and its variance."""
    ordered = sorted(smaller)
    # Equal values count half.
    wins = sum(bisect_left(ordered, one) + bisect_right(ordered, one) for one in larger) / 2
    pairs = len(larger) * len(smaller)
    return wins - pairs / 2, pairs * (len(larger) + len(smaller) + 1) / 12


def rank_deviations(larger: Collection[float], smaller: Collection[float]) -> float:
    """Return the same in standard deviations. Neither sample may be empty."""
    surplus, variance = rank_surplus(larger, smaller)
    return surplus / math.sqrt(variance)


def compare_kinds(
    usual: Mapping[Kind, Sequence[float]], observed: Mapping[Kind, Sequence[float]]
) -> tuple[float, float]:
    """Compare observed values with usual ones of the same kinds.

    Returns:
        By how many standard deviations the ranks of the observed ones exceed those of equal distributions,
        and by how much their medians do. Both are over kinds that occur in both; 0 if none does.
    """
    surplus = variance = delay = weights = 0.0
    for kind in usual.keys() & observed.keys():
        low, high = usual[kind], observed[kind]
        surplus_of_kind, variance_of_kind = rank_surplus(high, low)
        # Weighted so that kinds count by their number of values.
        weight = 1 / (len(low) + len(high) + 1)
        surplus += weight * surplus_of_kind
        variance += weight**2 * variance_of_kind
        share = weight * len(low) * len(high)
        delay += share * (median(high) - median(low))
        weights += share
    if not weights:
        return 0.0, 0.0
    return surplus / math.sqrt(variance), delay / weights
