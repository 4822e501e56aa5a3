"""The light adjustment between full runs: each queue follows its recent members a part of the way.

No queue is added, removed or split. The mean follows in both directions, because the score reads it. The
bounds only widen, over lengths that routing lets into the queue already. A part of a queue without arrivals
costs nothing, whereas a bound narrowed after a small sample would send the next length into a bubble queue.

Source: the online loop of EWSJF (arXiv 2601.21758). The sources name it and give no rule; this one is ours.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import numpy.typing as npt

from serve_app.scheduling.policies.partition import LengthInterval, Partition
from serve_app.settings_base import FINITE_POSITIVE, POSITIVE, SHARE, at_least, settings, share_below


@settings(block="adjustment")
class AdjustmentSettings:
    """How far queues follow recent lengths between two full runs."""

    # Seconds between two steps.
    interval_s: Annotated[float, FINITE_POSITIVE.hint("60 is usual")] = 60.0
    # Share of the way that a step goes. At a quarter, steps on the same traffic average out, and a queue is
    # half-way to its new members after three.
    rate: Annotated[float, SHARE.hint("0 is no adjustment")] = 0.25
    # A queue with fewer recent members stays as it is. The mean of 200 lengths in a wide queue is known to
    # about 5 %, of which a step goes a quarter.
    min_members: Annotated[int, at_least(1)] = 200
    # `partition_distance` from the queues in force at which the moved ones replace them. Steps on unchanged
    # traffic stay below it.
    min_distance: Annotated[float, POSITIVE] = 0.05
    # As in the scheduler's `ewsjf.tolerance_ratio`: how far beyond its bounds a queue takes lengths.
    tolerance_ratio: Annotated[float, share_below(1)] = 0.10


def adjusted(
    partition: Partition, recent: Sequence[int] | npt.NDArray[np.integer], settings: AdjustmentSettings
) -> Partition:
    """The same queues, each a step nearer to its recent members."""
    lengths = np.sort(np.asarray(recent, dtype=np.int64))
    queue_of = routed(partition, lengths, settings.tolerance_ratio)
    return Partition(
        tuple(
            _stepped(queue, lengths[queue_of == place], settings)
            for place, queue in enumerate(partition.intervals)
        )
    )


def routed(
    partition: Partition, lengths: npt.NDArray[np.int64], tolerance_ratio: float
) -> npt.NDArray[np.int64]:
    """The index of each length's queue by Dynamic Queue Routing, -1 for a bubble queue."""
    starts = np.array([queue.min_tokens for queue in partition.intervals])
    # The end of the queue below each start; below the first queue there is none.
    ends = np.array([-1, *(queue.max_tokens for queue in partition.intervals)])
    below = np.searchsorted(starts, lengths, side="right") - 1
    in_lower = lengths <= ends[below + 1] * (1 + tolerance_ratio)
    in_upper = lengths >= np.append(starts, np.inf)[below + 1] * (1 - tolerance_ratio)
    return np.where(in_lower, below, np.where(in_upper, below + 1, -1))


def _stepped(
    queue: LengthInterval, members: npt.NDArray[np.int64], settings: AdjustmentSettings
) -> LengthInterval:
    if len(members) < settings.min_members:
        return queue
    shortest, longest, rate = int(members[0]), int(members[-1]), settings.rate
    # Rounded towards the members, or a bound one token away would never be reached. Never beyond them, so
    # queues stay apart, because a length belongs to one queue only.
    low = queue.min_tokens - math.ceil(rate * max(0, queue.min_tokens - shortest))
    high = queue.max_tokens + math.ceil(rate * max(0, longest - queue.max_tokens))
    mean = queue.mean_tokens + rate * (float(members.mean()) - queue.mean_tokens)
    return replace(queue, min_tokens=low, max_tokens=high, mean_tokens=min(max(mean, low), high))
