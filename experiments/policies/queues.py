"""The length queues of a variant: learned with given settings, or one of a few fixed partitions."""

import itertools
import math
from dataclasses import replace

from serve_app.scheduling.policies.partition import LengthInterval, Partition
from serve_app.simulation.partitions import LEARNED, FixedPartition, PartitionSource, partition_source
from serve_app.tuning import LearnedPartitions, RefineAndPruneSettings, StrategicSettings

ONE_QUEUE, LOG_LINES = "one", "lines"
"""Names of fixed partitions: a single queue, and queues on fixed lines a fifth of a length apart."""

_LONGEST_TOKENS = 2**17
_LINE_WIDTH = 0.2
"""In logarithm; the default of `relative_range`."""


def queue_source(name: str, learning: RefineAndPruneSettings | None) -> PartitionSource | None:
    """The source of a variant's queues.

    Args:
        name: `one`, `lines`, or as `--partition` of `simulate`.
        learning: settings of Refine-and-Prune for `learned`; None are the defaults.
    """
    if name == ONE_QUEUE:
        return FixedPartition(_with_edges([1, _LONGEST_TOKENS]))
    if name == LOG_LINES:
        lines = math.ceil(math.log(_LONGEST_TOKENS) / _LINE_WIDTH)
        edges = {round(math.exp(_LINE_WIDTH * line)) for line in range(lines + 1)}
        return FixedPartition(_with_edges(sorted(edges)))
    strategic = StrategicSettings()
    if name == LEARNED and learning is not None:
        strategic = replace(strategic, refine_and_prune=learning)
    return partition_source(name, LearnedPartitions(strategic))


def _with_edges(edges: list[int]) -> Partition:
    return Partition(
        tuple(
            LengthInterval(min_tokens=low, max_tokens=high - 1, mean_tokens=(low + high - 1) / 2, count=1)
            for low, high in itertools.pairwise(edges)
        )
    )
