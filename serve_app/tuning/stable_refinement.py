"""Which queues are in the traffic itself, rather than in the sample that happened to be drawn?

The published refinement compares gaps between raw integer lengths. Its mean gap shrinks as the sample grows,
while no gap can be smaller than one token: with enough requests *every* gap is significant, and what ends the
splitting is the size of the sample. Ours takes the same steps on quantities that a larger sample only makes
sharper:

1. **Thinned.** `sample_size` lengths, evenly spaced in rank, stand for the whole. A gap between two of them
   is the room that a fixed share of the requests takes, however many there are.
2. **Logarithms.** Costs are relative, and so are `relative_range` and the tolerances of Dynamic Queue
   Routing.
3. **Coarse**, as published: it gives every region its own mean gap.
4. **Refine**, as published; but a gap narrower than `relative_range` is none, because queues are not made
   narrower than that anyway, and routing bridges it. The cut lies in the widest hole of all lengths, thinned
   or not.
5. **Cut what is smooth.** Where there is no gap, k-means and the widest gap put their cuts anywhere, and
   elsewhere each time. There, cuts lie on fixed lines, `relative_range` apart in logarithm: the same for each
   sample. It is also where the published refinement ends for very large samples, when only the relative
   range can stop it.
6. **Minimum share.** A cut that would leave a queue with less than `min_share` of the sample is not made.

`smooth="keep"` leaves step 5 out: queues are then bounded by clusters and gaps alone.
"""

import itertools

import numpy as np

from serve_app.tuning.gaps import Values, coarse_cuts, gap_cuts
from serve_app.tuning.partition_settings import Lengths, RefineAndPruneSettings


def stable_cuts(lengths: Lengths, settings: RefineAndPruneSettings) -> list[int]:
    """Positions at which the sorted lengths are cut into queues."""
    logs = np.log(lengths)
    least = max(1, int(np.ceil(settings.min_share * len(lengths))))
    picked = _evenly_spaced(len(lengths), settings.sample_size)
    between = _clusters_and_gaps(logs[picked], settings)
    cuts = sorted({_widest_hole(logs, int(picked[cut - 1]), int(picked[cut])) for cut in between})
    edges = _with_share([0, *cuts, len(lengths)], logs, least)
    if settings.smooth == "keep":
        return edges[1:-1]
    lines = _on_lines(logs, settings.relative_range)
    on_lines: list[int] = []
    for first, end in itertools.pairwise(edges):
        if logs[end - 1] - logs[first] >= settings.relative_range:
            on_lines += _greedy(lines[(lines > first) & (lines < end)], first, end, least)
    return sorted(edges[1:-1] + on_lines)


def _evenly_spaced(count: int, wanted: int) -> Lengths:
    """Positions of the middles of `wanted` equal parts of the sample; all of a small one."""
    wanted = min(count, wanted)
    positions: Lengths = ((np.arange(wanted) + 0.5) * count / wanted).astype(np.int64)
    return positions


def _clusters_and_gaps(logs: Values, settings: RefineAndPruneSettings) -> list[int]:
    """Cuts of the thinned sample: significant gaps, and with `smooth="keep"` the edges of clusters."""
    coarse = coarse_cuts(logs, settings.clusters, settings.seed)
    edges = [0, *coarse, len(logs)]
    cuts = [] if settings.smooth == "cut" else coarse

    def is_settled(stretch: Values) -> bool:
        return bool(np.diff(stretch).max() < settings.relative_range)

    for first, end in itertools.pairwise(edges):
        # One more on either side: the gap between two clusters is looked at as well.
        reach = (max(0, first - 1), min(len(logs), end + 1))
        cuts = cuts + gap_cuts(logs, reach, settings.alpha, is_settled)
    return cuts


def _widest_hole(logs: Values, first: int, last: int) -> int:
    """The cut between two positions that has the widest gap, the first one of equals."""
    return first + int(np.argmax(np.diff(logs[first : last + 1]))) + 1


def _with_share(edges: list[int], logs: Values, least: int) -> list[int]:
    """Edges without those that bound too small a stretch: the smallest first joins its nearer neighbour."""
    while len(edges) > 2:
        sizes = np.diff(edges)
        smallest = int(np.argmin(sizes))
        if sizes[smallest] >= least:
            break
        inner = [index for index in (smallest, smallest + 1) if 0 < index < len(edges) - 1]
        nearer = min(inner, key=lambda index: logs[edges[index]] - logs[edges[index] - 1])
        edges = edges[:nearer] + edges[nearer + 1 :]
    return edges


def _on_lines(logs: Values, step: float) -> Lengths:
    """Positions where the sorted logarithms pass a multiple of `step`."""
    cells = np.floor(logs / step)
    positions: Lengths = np.flatnonzero(np.diff(cells)) + 1
    return positions


def _greedy(lines: Lengths, first: int, end: int, least: int) -> list[int]:
    """Of the lines inside a stretch, from its short end, those that leave `least` members on either side."""
    cuts = []
    for line in lines:
        if line - first >= least and end - line >= least:
            first = int(line)
            cuts.append(first)
    return cuts
