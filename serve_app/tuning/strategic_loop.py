"""Strategic loop: decides when to relearn length queues, and whether the result is worth a change.

Lengths are observed one by one. `due` is called periodically, and returns a partition if a new one should
replace the current one. Time is an argument, so the same lengths at the same times give the same partitions.

Refine-and-Prune runs on the latest lengths: first as soon as a `window` of them was observed, then every
`interval_s` if there are enough new ones. A run takes about 25 ms. Its result is applied only if prompts
would see noticeably different queues (`partition_distance`), because each change routes all waiting requests
again and renames the queues in dashboards. So sudden changes of traffic, slow ones and none need no separate
rules.

Source: the strategic loop of EWSJF (arXiv 2601.21758). It relearns every ten minutes or when a test detects
drift, and adjusts the bounds in between. Relearning once a minute replaces all three.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt

from serve_app.core.policies.length_queues import Partition
from serve_app.core.settings_base import FINITE_POSITIVE, at_least, settings
from serve_app.tuning.refine_and_prune import RefineAndPruneSettings, refine_and_prune

_SAMPLE_WINDOWS = 4
"""Size of the sample, in windows. After a change of traffic the sample is all new once that many arrived."""
_NEW_SHARE = 0.5
"""Minimum number of new lengths for another run, in windows."""
_MIN_DISTANCE = 0.3
"""`partition_distance` at which a learned partition replaces the current one: above that between samples of
some hundred requests of the same traffic."""

ObservedLengths = Sequence[int] | npt.NDArray[np.integer]


@settings
class StrategicSettings:
    """Settings for when and how to learn queues.

    Attributes:
        window: lengths observed before the first run. A few dozen are too few for queues of 1 % each. At 500
            and 10 requests/s, the sample follows a changed mix within some minutes.
        interval_s: minimum seconds between two runs.
    """

    window: Annotated[int, at_least(2)] = 500
    interval_s: Annotated[float, FINITE_POSITIVE] = 60.0
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChange:
    """A partition that was applied.

    Attributes:
        at: time on the clock of the caller of `due`.
        lengths: number of lengths that it was learned from.
        distance: distance from the previous partition, see `partition_distance`; infinite for the first.
    """

    partition: Partition
    at: float
    lengths: int
    distance: float


def partition_distance(first: Partition, second: Partition, lengths: ObservedLengths) -> float:
    """Return how differently two partitions treat the same prompts.

    The score of a request depends on its queue through the queue's mean length. The distance is the mean over
    prompts of |ln(mean in one / mean in the other)|: at 0.3, lengths appear about a third different.
    """
    ratios = queue_means(first, lengths) / queue_means(second, lengths)
    return float(np.abs(np.log(ratios)).mean())


def queue_means(partition: Partition, lengths: ObservedLengths) -> npt.NDArray[np.float64]:
    """Return the mean length of each prompt's queue. A prompt in a gap counts to the queue below it."""
    starts = [queue.min_tokens for queue in partition.intervals]
    means = np.array([queue.mean_tokens for queue in partition.intervals], dtype=np.float64)
    return means[np.clip(np.searchsorted(starts, lengths, side="right") - 1, 0, None)]


class StrategicLoop:
    """Loop of one model.

    Attributes:
        change: the latest change; None until there is one.
        runs: number of Refine-and-Prune runs, including those without a change.
    """

    def __init__(self, settings: StrategicSettings) -> None:
        self._settings = settings
        self._recent: deque[int] = deque(maxlen=_SAMPLE_WINDOWS * settings.window)
        self._new = 0
        self._learned_at = -math.inf
        self.change: PartitionChange | None = None
        self.runs = 0

    def __repr__(self) -> str:
        queues = len(self.change.partition) if self.change else 0
        return f"<StrategicLoop queues={queues} runs={self.runs} lengths={len(self._recent)}>"

    def observe(self, prompt_tokens: int) -> None:
        """Record the estimated length of a prompt that arrived. Values below 1 are ignored."""
        if prompt_tokens >= 1:
            self._recent.append(prompt_tokens)
            self._new += 1

    def due(self, now: float) -> Partition | None:
        """Return the partition to apply at `now`, or None for no change. Cheap if nothing is due."""
        settings = self._settings
        if self._new < settings.window * (_NEW_SHARE if self.runs else 1.0):
            return None
        if now - self._learned_at < settings.interval_s:
            return None
        lengths = tuple(self._recent)
        found = refine_and_prune(lengths, settings.refine_and_prune)
        self.runs += 1
        self._new, self._learned_at = 0, now
        distance = math.inf
        if self.change is not None:
            distance = partition_distance(found, self.change.partition, lengths)
        if distance < _MIN_DISTANCE:
            return None
        self.change = PartitionChange(partition=found, at=now, lengths=len(lengths), distance=distance)
        return found


@dataclass(frozen=True, slots=True)
class LearnedPartitions:
    """Factory of loops, one per run; a plain value that can be sent to other processes.

    Attributes:
        by_policy: settings of individual policies.
    """

    settings: StrategicSettings = field(default_factory=StrategicSettings)
    by_policy: Mapping[str, StrategicSettings] = field(default_factory=dict)

    def learner(self, policy: str = "") -> StrategicLoop:
        """Return a new loop without observations."""
        return StrategicLoop(self.by_policy.get(policy, self.settings))
