"""Slice noise: how much neighbouring slices of traffic differ under the same values.

Near saturation a queue builds up for a minute and drains for another, and rewards vary by ten times the
effect of a candidate. A first pair that looks bad by less than that has shown nothing yet, nor has a trial
that ends a little better. So harm and gain are both measured against the noise of one pair (`trial_verdict`):
the root mean square of the differences of neighbouring slices, of the same length, under the values in force.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.metrics.record import RequestRecord
from serve_app.tuning.objective.objective import ObjectiveSettings, Reward, reward_of
from serve_app.tuning.online.rollout_settings import RolloutSettings

SLICES = 12
"""Slices before a trial that are used: a root mean square of 11 differences is known to a quarter."""


class Interval(NamedTuple):
    """A time interval from `start` to `end`, which is not included."""

    start: float
    end: float


class Measured(NamedTuple):
    """The reward of a slice.

    Attributes:
        expected: what the twin expected of it, if it was asked.
    """

    reward: Reward
    expected: Reward | None = None


Neighbours = tuple[Measured, Measured]
"""Two successive slices of one side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceNoise:
    """Standard deviations of the difference of two neighbouring slices under the same values.

    Attributes:
        reward: of the reward; 0 when nothing is known of it, which makes a trial strict.
        attainment: of the share within the targets, by class; classes that it lacks count as 0.
    """

    reward: float = 0.0
    attainment: Mapping[str, float] = field(default_factory=dict)


def steady_slices(begin: float, end: float, settings: RolloutSettings) -> tuple[Interval, ...]:
    """The last slices from `begin`, the time of the last change, to `end`; each without its beginning."""
    slice_s = settings.slice_s
    count = max(0, min(SLICES, int((end - begin) // slice_s)))
    starts = [end - (count - place) * slice_s for place in range(count)]
    return tuple(Interval(start + settings.settle_s, start + slice_s) for start in starts)


def rewards_in(
    intervals: Sequence[Interval], records: Iterable[RequestRecord], objective: ObjectiveSettings
) -> tuple[Reward, ...]:
    """The reward of the requests that arrived in each interval.

    Args:
        intervals: disjoint, in order of time.
        records: of these requests and others, in any order.
    """
    parts: list[list[RequestRecord]] = [[] for _ in intervals]
    for record in records:
        for part, interval in zip(parts, intervals, strict=True):
            if interval.start <= record.arrived_at < interval.end:
                part.append(record)
                break
    return tuple(reward_of(part, objective) for part in parts)


def neighbours_in(slices: Iterable[Measured]) -> list[Neighbours]:
    """Each slice of one side with the next."""
    return list(itertools.pairwise(slices))


def slice_noise_of(neighbours: Sequence[Neighbours]) -> SliceNoise:
    """The noise of slices under the same values."""
    return SliceNoise(
        reward=_root_mean_square([(before.reward.value, after.reward.value) for before, after in neighbours]),
        attainment={
            name: _root_mean_square(
                [
                    (attainment(before.reward, name), attainment(after.reward, name))
                    for before, after in neighbours
                ]
            )
            for name in classes_of(neighbours)
        },
    )


def classes_of(neighbours: Sequence[Neighbours]) -> list[str]:
    """The service classes that occur in any of these slices."""
    return sorted({name for pair in neighbours for measured in pair for name in measured.reward.classes})


def attainment(reward: Reward, name: str) -> float | None:
    """The share of a class within its targets; None when it does not occur."""
    figures = reward.classes.get(name)
    return None if figures is None else figures.attainment_ratio


def _root_mean_square(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """Root mean square of the differences whose ends are both known; 0 without any."""
    squares = [(after - before) ** 2 for before, after in pairs if before is not None and after is not None]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0
