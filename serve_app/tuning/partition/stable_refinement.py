"""The stable refinement: length queues that do not depend on the size of the sample.

The published refinement compares gaps between raw integer lengths. Its mean gap shrinks as the sample grows,
while no gap can be smaller than one token. With enough requests *every* gap is significant, and only the size
of the sample ends the splitting. Ours takes the same steps on quantities that a larger sample only makes
sharper:

1. **Thinned.** `sample_size` lengths, evenly spaced in rank, stand for the whole. A gap between two of them
   is the range that holds a fixed share of the requests, however many there are.
2. **Logarithms.** Costs are relative, and so are `relative_range` and the tolerances of Dynamic Queue
   Routing.
3. **Coarse**, as published: it gives every region its own mean gap.
4. **Refine**, as published, but gaps narrower than `relative_range` do not count: queues are not made
   narrower than that anyway, and routing bridges it. The cut lies in the widest gap of all lengths, thinned
   or not.
5. **Cut smooth ranges.** Without a gap, k-means and the widest gap would cut at random places that differ
   from sample to sample. There, cuts lie on fixed lines, `relative_range` apart in logarithm. The published
   refinement ends there as well for very large samples, when only the relative range can stop it.
6. **Minimum share.** A cut that would leave a queue with less than `min_share` of the sample is not made.
7. **Widen** instead of prune. If there are more than `max_queues`, all steps are repeated for queues and gaps
   a quarter wider. The utility of a pair (Eq 3) is a noisy figure, and merging another pair first changes all
   later merges.

`smooth="keep"` leaves step 5 out: queues are then bounded by clusters and gaps alone.
"""

import itertools
import math

import numpy as np

from serve_app.tuning.partition.gaps import Values, coarse_cuts, gap_cuts
from serve_app.tuning.partition.settings import Lengths, RefineAndPruneSettings

# Factor by which queues get wider at a time: small enough that the number of queues stays near its limit.
_WIDENING = 1.25


def stable_cuts(lengths: Lengths, settings: RefineAndPruneSettings) -> list[int]:
    """Positions at which the sorted lengths are cut into queues."""
    refinement = _Refinement(np.log(lengths), settings)
    width = settings.relative_range
    cuts = refinement.cuts(width)
    if settings.prune == "widen":
        # Ends at the latest when one queue may span all lengths.
        while len(cuts) >= settings.max_queues and width <= refinement.extent:
            width *= _WIDENING
            cuts = refinement.cuts(width)
    return cuts


class _Refinement:
    """One sample, to be cut into queues of different widths."""

    def __init__(self, logs: Values, settings: RefineAndPruneSettings) -> None:
        self._logs, self._settings = logs, settings
        self._least = max(1, math.ceil(settings.min_share * len(logs)))
        self._picked = _evenly_spaced(len(logs), settings.sample_size)
        self._coarse = coarse_cuts(logs[self._picked], settings.clusters, settings.seed)

    @property
    def extent(self) -> float:
        """Distance from the shortest length to the longest, in logarithms."""
        return float(self._logs[-1] - self._logs[0])

    def cuts(self, width: float) -> list[int]:
        """Positions of the cuts for queues at least `width` wide, in logarithms."""
        edges = self._with_share(self._gaps(width))
        if self._settings.smooth == "keep":
            return edges[1:-1]
        lines = np.flatnonzero(np.diff(np.floor(self._logs / width))) + 1
        within: list[int] = []
        for first, end in itertools.pairwise(edges):
            if self._logs[end - 1] - self._logs[first] >= width:
                within += self._greedy(lines[(lines > first) & (lines < end)], first, end)
        return sorted(edges[1:-1] + within)

    def _gaps(self, width: float) -> list[int]:
        """Significant gaps, and with `smooth="keep"` the edges of the coarse clusters."""
        thinned = self._logs[self._picked]
        cuts = set() if self._settings.smooth == "cut" else set(self._coarse)

        def is_settled(members: Values) -> bool:
            return bool(np.diff(members).max() < width)

        for first, end in itertools.pairwise([0, *self._coarse, len(thinned)]):
            # One more on either side: the gap between two clusters counts as well.
            reach = (max(0, first - 1), min(len(thinned), end + 1))
            cuts.update(gap_cuts(thinned, reach, self._settings.alpha, is_settled))
        return sorted({self._widest_gap(cut) for cut in cuts})

    def _widest_gap(self, cut: int) -> int:
        """The cut of all lengths for a cut of the thinned ones: at the widest gap, the first of equals."""
        first, last = self._picked[cut - 1], self._picked[cut]
        return int(first + np.argmax(np.diff(self._logs[first : last + 1]))) + 1

    def _with_share(self, cuts: list[int]) -> list[int]:
        """The edges after ranges with too few members have joined their nearer neighbour, smallest first."""
        edges = [0, *cuts, len(self._logs)]
        while len(edges) > 2:
            sizes = np.diff(edges)
            smallest = int(np.argmin(sizes))
            if sizes[smallest] >= self._least:
                break
            inner = [index for index in (smallest, smallest + 1) if 0 < index < len(edges) - 1]
            nearer = min(inner, key=lambda index: self._logs[edges[index]] - self._logs[edges[index] - 1])
            del edges[nearer]
        return edges

    def _greedy(self, lines: Lengths, first: int, end: int) -> list[int]:
        """Lines inside a range, from its short end, that leave the minimum share on either side."""
        cuts = []
        for line in lines:
            if line - first >= self._least and end - line >= self._least:
                first = int(line)
                cuts.append(first)
        return cuts


def _evenly_spaced(count: int, wanted: int) -> Lengths:
    """Positions of the middles of `wanted` equal parts of the sample; all of a small one."""
    wanted = min(count, wanted)
    positions: Lengths = ((np.arange(wanted) + 0.5) * count / wanted).astype(np.int64)
    return positions
