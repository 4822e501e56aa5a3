"""The settings of Refine-and-Prune."""

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from serve_app.settings_base import FINITE_POSITIVE, at_least, between, settings

Lengths = npt.NDArray[np.int64]
"""Prompt lengths in tokens, in ascending order."""

Mode = Literal["stable", "paper"]


@settings(block="refine_and_prune")
class RefineAndPruneSettings:
    """How queues are learned from prompt lengths.

    Attributes:
        mode: `paper` refines the raw lengths as published, and depends on the size of the sample; `stable`
            takes the same steps on logarithms of evenly spaced quantiles (see `stable_refinement`).
        alpha: a gap is significant when it is wider than so many mean gaps of its cluster.
        relative_range: a cluster whose lengths differ by less than this share of their mean is not split.
        min_cluster_size: a cluster of fewer lengths is not split; mode `paper` only.
        sample_size: how many lengths, evenly spaced in rank, stand for the whole; mode `stable` only.
        min_share: smallest share of the sample in a queue; mode `stable` only.
        seed: of k-means.
    """

    mode: Mode = "stable"
    # Lower makes more queues: about 25 at 1, and 3 to 12 at 5.5, the value of the released code. More of them
    # let the longest requests wait longer and move more from sample to sample, while the others gain next to
    # nothing.
    alpha: Annotated[float, FINITE_POSITIVE] = 5.5
    # k of the coarse k-means: short, medium, long.
    clusters: Annotated[int, at_least(1)] = 3
    # While there are more, the neighbours of the highest utility (Eq 3: dense and close together) become one.
    max_queues: Annotated[int, at_least(1)] = 32
    # Larger leaves wider clusters whole.
    relative_range: Annotated[float, FINITE_POSITIVE] = 0.2
    min_cluster_size: Annotated[int, at_least(2)] = 50
    # A quarter of the smallest sample that should give the same queues (500): each gap then averages several.
    sample_size: Annotated[int, at_least(16)] = 128
    # Larger has more requests behind each figure, and fewer queues, which are wider at the long end.
    min_share: Annotated[float, between(0, 0.5).hint("0.01 allows up to 100 queues")] = 0.01
    seed: int = 0


PAPER = RefineAndPruneSettings(mode="paper", alpha=1.5)
"""The published method, with the paper's alpha."""

RELEASED = RefineAndPruneSettings(mode="paper", alpha=5.5)
"""The published method, with the alpha of the code that the authors released."""
