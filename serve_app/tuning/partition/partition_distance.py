"""How differently do two partitions see the same prompts?

The score of a request depends on its queue through the queue's mean length. The distance is the mean over
prompts of |ln(mean in the one / mean in the other)|: 0.05 says that lengths seem about 5 % different. A new
partition that is closer than that to the one in use is hardly worth the re-routing of what waits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from serve_app.scheduling.policies.partition import Partition


def distance(first: Partition, second: Partition, lengths: Sequence[int] | npt.NDArray[np.integer]) -> float:
    """Mean absolute logarithm of the ratio of the queues' mean lengths, over these prompts."""
    ratios = queue_means(first, lengths) / queue_means(second, lengths)
    return float(np.abs(np.log(ratios)).mean())


def queue_means(
    partition: Partition, lengths: Sequence[int] | npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """The mean length of each prompt's queue; one in a gap counts to the queue of shorter lengths."""
    starts = [queue.min_tokens for queue in partition.intervals]
    means = np.array([queue.mean_tokens for queue in partition.intervals], dtype=np.float64)
    return means[np.clip(np.searchsorted(starts, lengths, side="right") - 1, 0, None)]
