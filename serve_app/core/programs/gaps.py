"""Learned gaps between the turns of a conversation, and the time for which a context is retained in a gap.

Whether a conversation returns soon depends on how its last turn ended: after calls of tools the median gap
of recorded coding sessions is 1 s, after a complete answer nearly 3 min. The distribution is learned for each
way of ending, as a histogram whose older observations have less weight.

A context in a gap holds room that another program could use. Let it go after time `T`, and the expected cost
of the gap `G` is

    price * E[min(G, T)] + P(G > T) * recompute_s

`price` is the share of the replica's cache that the context holds: so much of the replica is out of use while
others wait. `recompute_s` is the time to compute the context again. `retention_s` returns the `T` with the
lowest cost. For long contexts, both grow alike, so `T` depends on their ratio and on the gaps alone. It only
matters while other programs wait for room: nothing is released before.

Source: the ski-rental problem with a known distribution (Karlin et al., "Competitive randomized algorithms
for nonuniform problems", 1994). Continuum (arXiv 2511.02230) and SAECache (arXiv 2605.18825) retain contexts
for a learned time as well, inside the engine.
"""

import math
from bisect import bisect_right

from serve_app.request import TurnEnd

# Upper edges of the bins, in seconds: two for each octave from 1/8 s to nine hours. The last bin has no end.
_EDGES = tuple(2 ** (half / 2) for half in range(-6, 31))
# Percentiles of recorded coding sessions, as the edge below which so much of the gaps lies. They count as so
# many observations as `_PRIOR_WEIGHT`.
_PRIORS: dict[TurnEnd, tuple[tuple[float, float], ...]] = {
    TurnEnd.TOOLS: ((0.5, 1.1), (0.75, 10.0), (0.9, 60.0), (0.99, 606.0)),
    TurnEnd.DONE: ((0.1, 0.5), (0.5, 174.0), (0.9, 2_603.0), (0.99, 38_077.0)),
}
_PRIOR_WEIGHT = 20.0
# Weight of an observation over that of the one before: about the last five hundred count.
_GROWTH = 1.002
_MOST_WEIGHT = 1e12
# Observations after which the retention is computed again.
_STALE_AFTER = 20
# Ratios of the two costs are rounded to a third of an octave, so that few retentions are computed.
_RATIOS_PER_OCTAVE = 3


class GapTimes:
    """The distribution of gaps after one way of ending."""

    def __init__(self, prior: tuple[tuple[float, float], ...]) -> None:
        self._counts = [0.0] * (len(_EDGES) + 1)
        self._observed = 0
        # Later observations weigh more, instead of decaying all earlier ones each time.
        self._weight = 1.0
        self._retentions: dict[int, float] = {}
        below = 0.0
        for share, seconds in (*prior, (1.0, math.inf)):
            self._counts[bisect_right(_EDGES, seconds)] += _PRIOR_WEIGHT * (share - below)
            below = share

    def observe(self, gap_s: float) -> None:
        """Learn from one gap; infinite if the conversation did not return."""
        self._weight *= _GROWTH
        self._counts[bisect_right(_EDGES, gap_s)] += self._weight
        if self._weight > _MOST_WEIGHT:
            self._counts = [count / self._weight for count in self._counts]
            self._weight = 1.0
        self._observed += 1
        if self._observed % _STALE_AFTER == 0:
            self._retentions.clear()

    def retention_s(self, recompute_s: float, price: float) -> float:
        """Return the time for which to retain a context, in seconds.

        Args:
            recompute_s: time to compute the context again.
            price: cost of a second of retention, in the same unit as a second of computing.
        """
        ratio = round(_RATIOS_PER_OCTAVE * math.log2(max(recompute_s, 1e-6) / max(price, 1e-6)))
        known = self._retentions.get(ratio)
        if known is None:
            known = self._retentions[ratio] = self._cheapest(2 ** (ratio / _RATIOS_PER_OCTAVE))
        return known

    def _cheapest(self, recompute: float) -> float:
        """Return the cheapest time if a second of retention costs 1."""
        total = left = sum(self._counts)
        held = lower = best_s = 0.0
        best = recompute
        for upper, count in zip(_EDGES, self._counts, strict=False):
            # Those that return in this bin are held for half of it, the others for all of it.
            held += (upper - lower) * (left - count / 2)
            left -= count
            lower = upper
            cost = (held + left * recompute) / total
            if cost < best:
                best, best_s = cost, upper
        return best_s

    def __repr__(self) -> str:
        return f"<GapTimes n={self._observed}>"


class Gaps:
    """The gaps after each way of ending. An unknown one counts as calls of tools, the most frequent."""

    def __init__(self) -> None:
        self._tools, self._done = (GapTimes(_PRIORS[one]) for one in (TurnEnd.TOOLS, TurnEnd.DONE))

    def after(self, ending: TurnEnd | None) -> GapTimes:
        """Return the distribution of gaps after a way of ending."""
        return self._tools if ending in (None, TurnEnd.TOOLS) else self._done

    def __repr__(self) -> str:
        return f"<Gaps after tools {self._tools}, otherwise {self._done}>"
