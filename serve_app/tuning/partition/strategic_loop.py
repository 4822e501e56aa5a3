"""The strategic loop: when to learn length queues again, and whether the result is worth a change.

Lengths go in one by one. `due` is called now and then, and answers with a partition when a new one should
replace the one in force. Time is an argument, so the same lengths at the same times give the same partitions.

A full run of Refine-and-Prune happens

- `first`: as soon as `first_after` lengths have been seen;
- `interval`: `interval_s` after the last run, on the whole sample;
- `drift`: when the lengths have drifted since the last run (`drift`, tested every `drift_every` lengths), or
  too many of them fit no learned queue. It uses the recent lengths alone: older ones belong to other traffic
  and are dropped. A run in the middle of a change learns a mixture of both, which drifts again, and the next
  run corrects it.

Between full runs the queues follow their members by small steps (`online_adjustment`).

A new partition is put in force only if prompts would see noticeably different queues (`partition_distance`).
Each change routes all waiting requests again, and renames the queues in dashboards.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Annotated

import numpy as np
import numpy.typing as npt

from serve_app.scheduling.policies.partition import Partition
from serve_app.settings_base import FINITE_POSITIVE, at_least, settings
from serve_app.tuning.partition.drift import DriftSettings, has_drifted
from serve_app.tuning.partition.online_adjustment import AdjustmentSettings, adjusted, routed
from serve_app.tuning.partition.refine_and_prune import refine_and_prune
from serve_app.tuning.partition.settings import RefineAndPruneSettings


@settings(block="strategic")
class StrategicSettings:
    """When to learn queues, from what, and what counts as a change."""

    # Lengths kept to learn from, the last ones: at 10 to 40 requests/s those of 4 to 16 minutes, in 80 kB.
    # After a change of traffic they are all new once so many requests have arrived, while a random sample of
    # all requests would keep old ones for long.
    sample_size: Annotated[int, at_least(1)] = 10_000
    # Lengths seen before the first run. A few dozen say nothing about queues of 1 % each.
    first_after: Annotated[int, at_least(1)] = 500
    # Seconds between two runs, about ten minutes in the paper. A run takes a fraction of a second,
    # outside of the scheduler.
    interval_s: Annotated[float, FINITE_POSITIVE] = 600.0
    # Lengths between two tests for drift, and how many of the last ones are tested. At 10 requests/s a
    # changed mix is noticed within half a minute.
    drift_every: Annotated[int, at_least(1)] = 250
    # See `drift_every`.
    drift_window: Annotated[int, at_least(1)] = 500
    # `partition_distance` at which a learned partition replaces the one in force. It lies above the distance
    # between samples of some thousand requests of the same traffic.
    min_distance: Annotated[float, FINITE_POSITIVE] = 0.3
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)
    drift: DriftSettings = field(default_factory=DriftSettings)
    adjustment: AdjustmentSettings = field(default_factory=AdjustmentSettings)

    def __post_init__(self) -> None:
        for name in ("first_after", "drift_window"):
            if getattr(self, name) > self.sample_size:
                raise ValueError(
                    f"strategic.{name} of {getattr(self, name):,} exceeds sample_size "
                    f"{self.sample_size:,}: no more lengths are kept than that"
                )


class Reason(StrEnum):
    """Why a partition was put in force."""

    FIRST = "first"
    INTERVAL = "interval"
    DRIFT = "drift"
    ADJUSTED = "adjusted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionChange:
    """A partition that was put in force, and why.

    Attributes:
        at: time, on the clock of the caller of `due`.
        lengths: number of lengths that it was learned from, or adjusted by.
        distance: from the partition before, see `partition_distance`; infinite for the first.
    """

    partition: Partition
    reason: Reason
    at: float
    lengths: int
    distance: float


def partition_distance(
    first: Partition, second: Partition, lengths: Sequence[int] | npt.NDArray[np.integer]
) -> float:
    """How differently two partitions see the same prompts.

    The score of a request depends on its queue through the queue's mean length. The distance is the mean over
    prompts of |ln(mean in the one / mean in the other)|: at 0.3, lengths seem about a third different.
    """
    ratios = queue_means(first, lengths) / queue_means(second, lengths)
    return float(np.abs(np.log(ratios)).mean())


def queue_means(
    partition: Partition, lengths: Sequence[int] | npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """The mean length of each prompt's queue; one in a gap counts to the queue of shorter lengths."""
    starts = [queue.min_tokens for queue in partition.intervals]
    means = np.array([queue.mean_tokens for queue in partition.intervals], dtype=np.float64)
    return means[np.clip(np.searchsorted(starts, lengths, side="right") - 1, 0, None)]


class StrategicLoop:
    """The loop of one model.

    Attributes:
        change: the latest one; None until there is one.
        full_runs: how often Refine-and-Prune ran, whether or not it changed anything.
    """

    def __init__(self, settings: StrategicSettings) -> None:
        self._settings = settings
        self._recent: deque[int] = deque(maxlen=settings.sample_size)
        self._observed = 0
        self.change: PartitionChange | None = None
        self.full_runs = 0
        self._reference: tuple[int, ...] = ()
        self._moving: Partition | None = None
        self._learned_at = self._adjusted_at = 0.0
        # Lengths observed at the last test for drift, and at the last adjustment.
        self._tested = self._adjusted = 0

    def __repr__(self) -> str:
        queues = len(self.change.partition) if self.change else 0
        return f"<StrategicLoop queues={queues} full_runs={self.full_runs} observed={self._observed}>"

    def observe(self, prompt_tokens: int) -> None:
        """Note the length of a prompt that arrived, as the scheduler estimates it; below 1 it is ignored."""
        if prompt_tokens >= 1:
            self._recent.append(prompt_tokens)
            self._observed += 1

    def due(self, now: float) -> Partition | None:
        """The partition to put in force now; None when the present one stays. Cheap when nothing is due.

        Args:
            now: seconds, on a clock that never goes back.
        """
        reason = self._reason_to_learn(now)
        if reason is not None:
            return self._learn(reason, now)
        return self._adjust(now)

    def _reason_to_learn(self, now: float) -> Reason | None:
        settings = self._settings
        if not self._reference:
            return Reason.FIRST if self._observed >= settings.first_after else None
        if now - self._learned_at >= settings.interval_s:
            return Reason.INTERVAL
        if self._observed - self._tested < settings.drift_every:
            return None
        self._tested = self._observed
        recent = self._last(settings.drift_window)
        drift = has_drifted(self._reference, recent, settings.drift)
        return Reason.DRIFT if drift.drifted or (drift.enough and self._fits_badly(recent)) else None

    def _fits_badly(self, recent: Sequence[int]) -> bool:
        """Whether too many prompts belong to no learned queue.

        The drift test compares distributions. A kind of prompts whose lengths all moved is no significant
        shift where it is a quarter of few requests, though each of them waits in a bubble queue. The lengths
        that queues were learned from leave next to none outside, so this share needs no other significance.
        """
        if self._moving is None:
            return False
        strangers = routed(
            self._moving, np.asarray(recent, dtype=np.int64), self._settings.adjustment.tolerance_ratio
        )
        return float(np.mean(strangers < 0)) >= self._settings.drift.min_shift

    def _learn(self, reason: Reason, now: float) -> Partition | None:
        if reason is Reason.DRIFT:
            self._recent = deque(self._last(self._settings.drift_window), maxlen=self._recent.maxlen)
        lengths = tuple(self._recent)
        found = refine_and_prune(lengths, self._settings.refine_and_prune)
        self.full_runs += 1
        self._reference = lengths
        self._learned_at = self._adjusted_at = now
        self._tested = self._adjusted = self._observed
        return self._put_in_force(found, reason, now, lengths)

    def _last(self, count: int) -> tuple[int, ...]:
        """The last so many lengths, the oldest first."""
        return tuple(islice(self._recent, max(0, len(self._recent) - count), None))

    def _adjust(self, now: float) -> Partition | None:
        settings = self._settings.adjustment
        new = self._observed - self._adjusted
        if self._moving is None or now - self._adjusted_at < settings.interval_s or not new:
            return None
        recent = self._last(new)
        self._adjusted_at, self._adjusted = now, self._observed
        self._moving = adjusted(self._moving, recent, settings)
        return self._put_in_force(self._moving, Reason.ADJUSTED, now, recent)

    def _put_in_force(
        self, found: Partition, reason: Reason, now: float, lengths: Sequence[int]
    ) -> Partition | None:
        """The partition found, if it is far enough from the one in force for prompts of these lengths."""
        settings = self._settings
        least = settings.adjustment.min_distance if reason is Reason.ADJUSTED else settings.min_distance
        distance = math.inf
        if self.change is not None:
            distance = partition_distance(found, self.change.partition, lengths)
        if distance < least:
            return None
        self._moving = found
        self.change = PartitionChange(
            partition=found, reason=reason, at=now, lengths=len(lengths), distance=distance
        )
        return found


@dataclass(frozen=True, slots=True)
class LearnedPartitions:
    """Makes a loop for each run; a plain value, so it can be sent to other processes.

    Attributes:
        by_policy: settings for single policies.
    """

    settings: StrategicSettings = field(default_factory=StrategicSettings)
    by_policy: Mapping[str, StrategicSettings] = field(default_factory=dict)

    def learner(self, policy: str = "") -> StrategicLoop:
        """A new loop that has seen no lengths."""
        return StrategicLoop(self.by_policy.get(policy, self.settings))
