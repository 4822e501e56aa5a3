"""The stable refinement: length queues that do not depend on the size of the sample.

The published refinement compares gaps between raw integer lengths. Its mean gap shrinks as the sample grows,
while no gap can be smaller than one token. With enough requests *every* gap is significant, whatever alpha,
and only pruning ends the splitting. Ours takes the same steps on quantities that a larger sample only makes
sharper:

1. **Thinned.** `sample_size` lengths, evenly spaced in rank, stand for the whole. A gap between two of them
   is the range that holds a fixed share of the requests, however many there are.
2. **Logarithms.** Costs are relative, and so are `relative_range` and the tolerances of Dynamic Queue
   Routing.
3. **Coarse** and **refine**, as published. The cut lies in the widest gap of all lengths, thinned or not.
4. **Minimum share.** A queue with less than `min_share` of the sample joins its nearer neighbour.
"""

import itertools
import math

import numpy as np

from serve_app.tuning.partition.gaps import Values, coarse_cuts, gap_cuts
from serve_app.tuning.partition.settings import Lengths, RefineAndPruneSettings


def stable_cuts(lengths: Lengths, settings: RefineAndPruneSettings) -> list[int]:
    """Positions at which the sorted lengths are cut into queues."""
    logs = np.log(lengths)
    picked = _evenly_spaced(len(logs), settings.sample_size)
    thinned = logs[picked]

    def is_settled(members: Values) -> bool:
        return bool(members[-1] - members[0] < settings.relative_range)

    coarse = coarse_cuts(thinned, settings.clusters, settings.seed)
    cuts = set(coarse)
    for first, end in itertools.pairwise([0, *coarse, len(thinned)]):
        cuts.update(gap_cuts(thinned, (first, end), settings.alpha, is_settled))
    in_whole = sorted(_widest_gap(logs, picked[cut - 1], picked[cut]) for cut in cuts)
    least = max(1, math.ceil(settings.min_share * len(logs)))
    return _with_share(logs, in_whole, least)


def _widest_gap(logs: Values, first: int, last: int) -> int:
    """The cut of all lengths for one between two of the thinned: at the widest gap, the first of equals."""
    return int(first + np.argmax(np.diff(logs[first : last + 1]))) + 1


def _with_share(logs: Values, cuts: list[int], least: int) -> list[int]:
    """The cuts after queues of fewer than `least` members have joined their neighbours, smallest first."""
    edges = [0, *cuts, len(logs)]
    while len(edges) > 2:
        sizes = np.diff(edges)
        smallest = int(np.argmin(sizes))
        if sizes[smallest] >= least:
            break
        inner = [index for index in (smallest, smallest + 1) if 0 < index < len(edges) - 1]
        nearer = min(inner, key=lambda index: logs[edges[index]] - logs[edges[index] - 1])
        del edges[nearer]
    return edges[1:-1]


def _evenly_spaced(count: int, wanted: int) -> Lengths:
    """Positions of the middles of `wanted` equal parts of the sample; all of a small one."""
    wanted = min(count, wanted)
    positions: Lengths = ((np.arange(wanted) + 0.5) * count / wanted).astype(np.int64)
    return positions
