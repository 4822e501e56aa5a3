"""Coarse clusters of a sorted sample, and the significant gaps inside them.

Both modes of Refine-and-Prune use these two steps. A position is the index of the first member to the right
of a cut.

Source: EWSJF (arXiv 2601.21758), section 4.2, steps 1 and 2.
"""

import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""Lengths or their logarithms, in ascending order."""

# Decimal places of the midpoints between centres: threads add in any order, and a length that lies exactly on
# a midpoint must not change sides by a rounding error.
_PLACES = 6
_RESTARTS = 5


def coarse_cuts(values: Values, clusters: int, seed: int) -> list[int]:
    """Positions at which 1-D k-means cuts the sample, at most `clusters - 1`."""
    distinct, counts = np.unique(values, return_counts=True)
    clusters = min(clusters, len(distinct))
    if clusters < 2:
        return []
    # Takes seconds to import, and whoever only reads settings should not wait for it.
    from sklearn.cluster import KMeans  # noqa: PLC0415
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 - same

    model = KMeans(clusters, init="k-means++", n_init=_RESTARTS, random_state=seed)
    with warnings.catch_warnings():
        # Where the values allow fewer clusters, fewer cuts are right.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Each distinct value once with its count as weight: the same objective, on far fewer points.
        model.fit(distinct.reshape(-1, 1), sample_weight=counts.astype(np.float64))
    centres = np.sort(model.cluster_centers_.ravel())
    midpoints = np.round((centres[:-1] + centres[1:]) / 2, _PLACES)
    positions = np.searchsorted(values, midpoints, side="right")
    return [int(position) for position in np.unique(positions) if 0 < position < len(values)]


def gap_cuts(
    values: Values,
    edges: tuple[int, int],
    alpha: float,
    is_settled: Callable[[Values], bool],
) -> list[int]:
    """Positions of the significant gaps between `edges`, in ascending order.

    The widest gap splits the range, the first one of equals. Then each half is examined with its own mean
    gap. A range for which `is_settled` holds, or whose widest gap is not significant, stays whole.
    """
    cuts = []
    open_ranges = [edges]  # a stack instead of recursion: a raw sample may split one by one
    while open_ranges:
        first, end = open_ranges.pop()
        members = values[first:end]
        if len(members) < 2 or is_settled(members):
            continue
        gaps = np.diff(members)
        widest = int(np.argmax(gaps))
        if gaps[widest] <= alpha * gaps.mean():
            continue
        cut = first + widest + 1
        cuts.append(cut)
        open_ranges += [(first, cut), (cut, end)]
    return sorted(cuts)
