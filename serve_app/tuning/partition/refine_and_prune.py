"""Refine-and-Prune: length queues from prompt lengths, by k-means, significant gaps and pruning.

A coarse k-means is refined at significant gaps and pruned by utility. The input is a sample of prompt
lengths, the output a `Partition`. The same lengths give the same queues, in whatever order they come.

Source: EWSJF (arXiv 2601.21758), section 4.2. `mode="paper"` follows it where the sources agree;
`mode="stable"` (ours, the default) is described in `stable_refinement`.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from serve_app.errors import ServeAppError
from serve_app.scheduling.policies.partition import LengthInterval, Partition
from serve_app.tuning.partition.gaps import Values, coarse_cuts, gap_cuts
from serve_app.tuning.partition.settings import Lengths, RefineAndPruneSettings
from serve_app.tuning.partition.stable_refinement import stable_cuts
from serve_app.tuning.partition.utility import prune

# Below this, integers are exact as floating-point numbers, which k-means needs.
LONGEST_TOKENS = 2**53


class LengthsError(ServeAppError):
    """Prompt lengths from which no queues can be learned; the message names the first one."""


def refine_and_prune(
    lengths: Sequence[int] | npt.NDArray[np.integer], settings: RefineAndPruneSettings
) -> Partition:
    """Learn the length queues of a sample of prompt lengths, in tokens.

    Raises:
        LengthsError: there is no length, or one that is not a whole number from 1 to 2**53.
    """
    return Partition(tuple(prune(refine(lengths, settings), settings.max_queues)))


def refine(
    lengths: Sequence[int] | npt.NDArray[np.integer], settings: RefineAndPruneSettings
) -> list[LengthInterval]:
    """Steps 1 and 2, coarse and refine: the queues before any is pruned.

    Raises:
        LengthsError: as `refine_and_prune`.
    """
    ordered = _checked(lengths)
    cuts = stable_cuts(ordered, settings) if settings.mode == "stable" else _paper_cuts(ordered, settings)
    return [_interval(part) for part in np.split(ordered, cuts)]


def _checked(lengths: Sequence[int] | npt.NDArray[np.integer]) -> Lengths:
    """The lengths in ascending order."""
    given = np.asarray(lengths)
    if given.ndim != 1 or given.size == 0:
        raise LengthsError(
            f"queues are learned from a list of at least one prompt length, got one of shape {given.shape}: "
            "wait until requests have been observed"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise LengthsError(f"prompt lengths are whole numbers, got {given.dtype}: {given[:3].tolist()}")
    shortest, longest = int(given.min()), int(given.max())
    if shortest < 1 or longest > LONGEST_TOKENS:
        wrong = shortest if shortest < 1 else longest
        raise LengthsError(f"a prompt has 1 to 2**53 tokens, got one of {wrong}")
    return np.sort(given.astype(np.int64))


def _paper_cuts(lengths: Lengths, settings: RefineAndPruneSettings) -> list[int]:
    """Positions at which the published refinement cuts the sorted lengths."""
    values = lengths.astype(np.float64)
    coarse = coarse_cuts(values, settings.clusters, settings.seed)

    def is_settled(cluster: Values) -> bool:
        if len(cluster) < settings.min_cluster_size:
            return True
        return bool(cluster[-1] - cluster[0] < settings.relative_range * cluster.mean())

    edges = [0, *coarse, len(values)]
    cuts = list(coarse)
    for first, end in itertools.pairwise(edges):
        cuts += gap_cuts(values, (first, end), settings.alpha, is_settled)
    return sorted(cuts)


def _interval(members: Lengths) -> LengthInterval:
    shortest, longest = int(members[0]), int(members[-1])
    return LengthInterval(
        min_tokens=shortest,
        max_tokens=longest,
        # Rounding can put the mean of equal numbers beside them.
        mean_tokens=min(max(float(members.mean()), shortest), longest),
        count=len(members),
    )
