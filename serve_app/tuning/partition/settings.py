"""The settings of Refine-and-Prune: every point that the sources leave open is a switch.

`experiments/partition` measures the effect of each switch.
"""

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from serve_app.settings_base import FINITE_POSITIVE, at_least, between, settings

Lengths = npt.NDArray[np.int64]
"""Prompt lengths in tokens, in ascending order."""

Mode = Literal["stable", "paper"]
Prune = Literal["widen", "merge-highest", "merge-lowest"]
Merge = Literal["merge-highest", "merge-lowest"]
Bounds = Literal["data", "midpoint"]
Smooth = Literal["cut", "keep"]


@settings(block="refine_and_prune")
class RefineAndPruneSettings:
    """How queues are learned from prompt lengths.

    Attributes:
        mode: `paper` refines the raw lengths as published, and depends on the size of the sample; `stable`
            refines quantities that are alike in any sample of the traffic (see `stable_refinement`).
        alpha: a gap is significant when it is wider than so many mean gaps of its cluster.
        relative_range: a cluster whose lengths differ by less than this share of their mean is not split.
        prune: what happens while there are too many queues. `merge-highest`: the neighbours of the highest
            utility (Eq 3: dense and close together) become one, as the released code does in effect;
            `merge-lowest`: those of the lowest; `widen`: all are learned again, a quarter wider; mode
            `stable` only.
        bounds: `data` ends a queue at its own shortest and longest length, which leaves gaps that bubble
            queues serve; `midpoint` ends it half-way to its neighbour, which leaves none.
        min_cluster_size: a cluster of fewer lengths is not split; mode `paper` only.
        sample_size: how many lengths, evenly spaced in rank, stand for the whole; mode `stable` only.
        min_share: smallest share of the sample in a queue; mode `stable` only.
        smooth: what happens to a range without significant gaps that is wider than `relative_range`: it is
            cut on fixed lines, or kept whole; mode `stable` only.
        seed: of k-means.
    """

    mode: Mode = "stable"
    # Lower splits more in mode `paper` (5.5 in the released code). In mode `stable` it hardly matters: there
    # `relative_range` decides how fine the queues are.
    alpha: Annotated[float, FINITE_POSITIVE] = 1.5
    # k of the coarse k-means: short, medium, long.
    clusters: Annotated[int, at_least(1)] = 3
    # More queues order long prompts more finely: fewer leave more spread inside each. Beyond 32,
    # `relative_range` and `min_share` set the limit.
    max_queues: Annotated[int, at_least(1)] = 32
    # Larger makes fewer queues, with more spread inside each.
    relative_range: Annotated[float, FINITE_POSITIVE] = 0.2
    # See step 7 of `stable_refinement`.
    prune: Prune = "widen"
    bounds: Bounds = "data"
    min_cluster_size: Annotated[int, at_least(2)] = 50
    # A quarter of the smallest sample that should give the same queues (500): each gap then averages several.
    sample_size: Annotated[int, at_least(16)] = 128
    # Larger has more requests behind each figure, and fewer queues, which are wider at the long end.
    min_share: Annotated[float, between(0, 0.5).hint("0.01 allows up to 100 queues")] = 0.01
    # `keep` leaves a few wide queues, whose bounds move with the sample. It favours short prompts at the
    # expense of long ones.
    smooth: Smooth = "cut"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode == "paper" and self.prune == "widen":
            raise ValueError("mode paper cannot widen its queues: set prune to merge-highest or merge-lowest")


PAPER = RefineAndPruneSettings(mode="paper", prune="merge-highest")
"""The published method, with the paper's alpha."""

RELEASED = RefineAndPruneSettings(mode="paper", prune="merge-highest", alpha=5.5)
"""The published method, with the alpha of the code that the authors released."""
