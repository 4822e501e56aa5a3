"""Strategic loop: decides when to relearn length queues, and whether the result is worth a change.

Lengths are observed one by one. `due` is called periodically, and returns a partition if a new one should
replace the current one. Time is an argument, so the same lengths at the same times give the same partitions.

A full run of Refine-and-Prune happens

- `first`: as soon as a `window` of lengths was observed;
- `interval`: `interval_s` after the last run, on the whole sample;
- `drift`: if the recent lengths differ from those of the last run (`has_drifted`), or too many of them fit no
  learned queue. It uses the recent lengths only: older ones belong to other traffic and are dropped. A run
  during a change learns a mixture of both, which drifts again, and the next run corrects it.

Between full runs each queue follows its recent members in small steps (`adjusted`).

A new partition is applied only if prompts would see noticeably different queues (`partition_distance`),
because each change routes all waiting requests again and renames the queues in dashboards.

Source: the strategic and the online loop of EWSJF (arXiv 2601.21758). The sources name the online loop
without specifying a rule; `adjusted` is this project's.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Annotated

import numpy as np
import numpy.typing as npt

from serve_app.core.policies.length_queues import TOLERANCE_RATIO, LengthInterval, Partition
from serve_app.core.settings_base import FINITE_POSITIVE, at_least, settings
from serve_app.tuning.refine_and_prune import RefineAndPruneSettings, refine_and_prune

_SAMPLE = 10_000
"""Sample size, the latest lengths: 4 to 16 minutes at 10 to 40 requests/s, in 80 kB. After a change of
traffic they are all new once that many requests have arrived."""
_MIN_SHIFT = 0.1
"""Minimum share of requests that moved across some length. Queues are 20 % wide and routing bridges another
10 %, so a smaller shift changes the queue of few."""
_SIGNIFICANCE = 0.001
"""Chance of a false alarm per test. Real arrivals are bursty, so samples vary more than independent ones."""
_MIN_DISTANCE = 0.3
"""`partition_distance` at which a learned partition replaces the current one: above that between samples of
some thousand requests of the same traffic."""

_ADJUST_EVERY_S = 60.0
_ADJUST_RATE = 0.25
"""Share of the distance to its members by which a queue moves per step: half of it after three."""
_ADJUST_MIN_MEMBERS = 200
"""The mean of that many lengths in a wide queue is known to about 5 %, of which a step moves a quarter."""
_ADJUST_MIN_DISTANCE = 0.05
"""Steps on unchanged traffic remain below it."""

Lengths = Sequence[int] | npt.NDArray[np.integer]


@settings
class StrategicSettings:
    """Settings for when and how to learn queues.

    Attributes:
        window: lengths observed before the first run; also the latest lengths tested for drift, after every
            half as many. A few dozen are too few for queues of 1 % each. At 500 and 10 requests/s, a changed
            mix is detected within half a minute.
        interval_s: seconds between two runs, about ten minutes in the paper.
    """

    window: Annotated[int, at_least(2)] = 500
    interval_s: Annotated[float, FINITE_POSITIVE] = 600.0
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)


class Reason(StrEnum):
    """Why a partition was applied."""

    FIRST = "first"
    INTERVAL = "interval"
    DRIFT = "drift"
    ADJUSTED = "adjusted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChange:
    """A partition that was applied, and why.

    Attributes:
        at: time on the clock of the caller of `due`.
        lengths: number of lengths that it was learned from, or adjusted by.
        distance: distance from the previous partition, see `partition_distance`; infinite for the first.
    """

    partition: Partition
    reason: Reason
    at: float
    lengths: int
    distance: float


def has_drifted(reference: Lengths, recent: Lengths) -> bool:
    """Return whether recent lengths are from another distribution than those that queues were learned from.

    This is the two-sample Kolmogorov-Smirnov test. Its statistic is the largest share of requests that moved
    across some length. It has to exceed a practical minimum, because with enough requests any difference
    becomes significant, and the test's critical value (Smirnov's asymptotic one).

    A few very long prompts are much work but a small share of the requests, so the test does not detect them.
    They get bubble queues until the next run by interval.
    """
    before, now = np.sort(np.asarray(reference)), np.sort(np.asarray(recent))
    lengths = np.union1d(before, now)
    shares = (np.searchsorted(each, lengths, side="right") / len(each) for each in (before, now))
    shift = float(np.abs(np.subtract(*shares)).max())
    critical = math.sqrt(-math.log(_SIGNIFICANCE / 2) / 2 * (1 / len(before) + 1 / len(now)))
    return shift >= max(_MIN_SHIFT, critical)


def adjusted(partition: Partition, recent: Lengths) -> Partition:
    """Return the same queues, each moved a step towards its recent members.

    No queue is added, removed or split. The mean follows in both directions, because the score depends on it.
    The bounds only widen, over lengths that routing already assigns to the queue. A part of a queue without
    arrivals costs nothing, whereas a bound narrowed after a small sample would send the next length to a
    bubble queue.
    """
    lengths = np.sort(np.asarray(recent, dtype=np.int64))
    queue_of = routed(partition, lengths)
    return Partition(
        tuple(_stepped(queue, lengths[queue_of == place]) for place, queue in enumerate(partition.intervals))
    )


def routed(partition: Partition, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the index of each length's queue by Dynamic Queue Routing; -1 for a bubble queue."""
    starts = np.array([queue.min_tokens for queue in partition.intervals])
    # The end of the queue below each start. Below the first queue there is none.
    ends = np.array([-1, *(queue.max_tokens for queue in partition.intervals)])
    below = np.searchsorted(starts, lengths, side="right") - 1
    in_lower = lengths <= ends[below + 1] * (1 + TOLERANCE_RATIO)
    in_upper = lengths >= np.append(starts, np.inf)[below + 1] * (1 - TOLERANCE_RATIO)
    return np.where(in_lower, below, np.where(in_upper, below + 1, -1))


def _stepped(queue: LengthInterval, members: npt.NDArray[np.int64]) -> LengthInterval:
    if len(members) < _ADJUST_MIN_MEMBERS:
        return queue
    shortest, longest, rate = int(members[0]), int(members[-1]), _ADJUST_RATE
    # Rounded towards the members, because a bound one token away would never be reached. Never beyond them,
    # so queues remain disjoint, because a length belongs to one queue only.
    low = queue.min_tokens - math.ceil(rate * max(0, queue.min_tokens - shortest))
    high = queue.max_tokens + math.ceil(rate * max(0, longest - queue.max_tokens))
    mean = queue.mean_tokens + rate * (float(members.mean()) - queue.mean_tokens)
    return replace(queue, min_tokens=low, max_tokens=high, mean_tokens=min(max(mean, low), high))


def partition_distance(first: Partition, second: Partition, lengths: Lengths) -> float:
    """Return how differently two partitions treat the same prompts.

    The score of a request depends on its queue through the queue's mean length. The distance is the mean over
    prompts of |ln(mean in one / mean in the other)|: at 0.3, lengths appear about a third different.
    """
    ratios = queue_means(first, lengths) / queue_means(second, lengths)
    return float(np.abs(np.log(ratios)).mean())


def queue_means(partition: Partition, lengths: Lengths) -> npt.NDArray[np.float64]:
    """Return the mean length of each prompt's queue. A prompt in a gap counts to the queue below it."""
    starts = [queue.min_tokens for queue in partition.intervals]
    means = np.array([queue.mean_tokens for queue in partition.intervals], dtype=np.float64)
    return means[np.clip(np.searchsorted(starts, lengths, side="right") - 1, 0, None)]


class StrategicLoop:
    """Loop of one model.

    Attributes:
        change: the latest change; None until there is one.
        full_runs: number of Refine-and-Prune runs, including those without a change.
    """

    def __init__(self, settings: StrategicSettings) -> None:
        self._settings = settings
        self._recent: deque[int] = deque(maxlen=_SAMPLE)
        self._observed = 0
        self.change: PartitionChange | None = None
        self.full_runs = 0
        self._reference: tuple[int, ...] = ()
        # The current partition, including steps that were too small to be applied.
        self._moving: Partition | None = None
        self._learned_at = self._adjusted_at = 0.0
        # Number of observed lengths at the last test for drift, and at the last adjustment.
        self._tested = self._adjusted = 0

    def __repr__(self) -> str:
        queues = len(self.change.partition) if self.change else 0
        return f"<StrategicLoop queues={queues} full_runs={self.full_runs} observed={self._observed}>"

    def observe(self, prompt_tokens: int) -> None:
        """Record the estimated length of a prompt that arrived. Values below 1 are ignored."""
        if prompt_tokens >= 1:
            self._recent.append(prompt_tokens)
            self._observed += 1

    def due(self, now: float) -> Partition | None:
        """Return the partition to apply at `now`, or None for no change. Cheap if nothing is due."""
        reason = self._reason_to_learn(now)
        if reason is not None:
            return self._learn(reason, now)
        return self._adjust(now)

    def _reason_to_learn(self, now: float) -> Reason | None:
        if not self._reference:
            return Reason.FIRST if self._observed >= self._settings.window else None
        if now - self._learned_at >= self._settings.interval_s:
            return Reason.INTERVAL
        if self._observed - self._tested < self._settings.window // 2:
            return None
        self._tested = self._observed
        recent = self._last(self._settings.window)
        drifted = has_drifted(self._reference, recent) or self._fits_badly(recent)
        return Reason.DRIFT if drifted else None

    def _fits_badly(self, recent: Sequence[int]) -> bool:
        """Return whether too many prompts belong to no learned queue.

        The drift test compares distributions. If all lengths of one kind of prompts moved, that is no
        significant shift if they are a quarter of few requests, though each of them waits in a bubble queue.
        The lengths that queues were learned from leave almost none outside, so this share needs no further
        significance test.
        """
        if self._moving is None:
            return False
        strangers = routed(self._moving, np.asarray(recent, dtype=np.int64)) < 0
        return float(np.mean(strangers)) >= _MIN_SHIFT

    def _learn(self, reason: Reason, now: float) -> Partition | None:
        if reason is Reason.DRIFT:
            self._recent = deque(self._last(self._settings.window), maxlen=_SAMPLE)
        lengths = tuple(self._recent)
        found = refine_and_prune(lengths, self._settings.refine_and_prune)
        self.full_runs += 1
        self._reference = lengths
        self._learned_at = self._adjusted_at = now
        self._tested = self._adjusted = self._observed
        return self._replace_if_different(found, reason, now, lengths, _MIN_DISTANCE)

    def _last(self, count: int) -> tuple[int, ...]:
        """Return the latest `count` lengths, oldest first."""
        return tuple(islice(self._recent, max(0, len(self._recent) - count), None))

    def _adjust(self, now: float) -> Partition | None:
        new = self._observed - self._adjusted
        if self._moving is None or now - self._adjusted_at < _ADJUST_EVERY_S or not new:
            return None
        recent = self._last(new)
        self._adjusted_at, self._adjusted = now, self._observed
        self._moving = adjusted(self._moving, recent)
        return self._replace_if_different(self._moving, Reason.ADJUSTED, now, recent, _ADJUST_MIN_DISTANCE)

    def _replace_if_different(
        self, found: Partition, reason: Reason, now: float, lengths: Sequence[int], min_distance: float
    ) -> Partition | None:
        """Return the new partition if it differs enough from the current one for prompts of these lengths."""
        distance = math.inf
        if self.change is not None:
            distance = partition_distance(found, self.change.partition, lengths)
        if distance < min_distance:
            return None
        self._moving = found
        self.change = PartitionChange(
            partition=found, reason=reason, at=now, lengths=len(lengths), distance=distance
        )
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
