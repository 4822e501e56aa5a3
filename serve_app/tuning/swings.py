"""How much do neighbouring slices of traffic differ by themselves? Asked before a trial, of what is in force.

Near saturation a queue builds up for a minute and drains for another, and rewards swing by ten times what a
candidate could change. A trial whose first pair looks bad by less than that has told nothing yet, nor has one
that ends a little better. So harm and gain are both measured against the swing of one pair (`canary`): the
root mean square of the differences of neighbouring slices, of the same length, under the values in force.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.metrics.record import RequestRecord
from serve_app.tuning.objective import ObjectiveSettings, Reward, reward_of
from serve_app.tuning.rollout_settings import RolloutSettings

_SLICES = 12
"""Slices that are looked back at: a root mean square of 11 differences is known to a quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swings:
    """Standard deviations of the difference of two neighbouring slices under the same values.

    Attributes:
        reward: of the reward; 0 when nothing is known of it, which makes a trial strict.
        attainment: of the share within the targets, by class; classes that it lacks count as 0.
    """

    reward: float = 0.0
    attainment: Mapping[str, float] = field(default_factory=dict)


def swings_of(
    records: Iterable[RequestRecord],
    begin: float,
    end: float,
    objective: ObjectiveSettings,
    settings: RolloutSettings,
) -> Swings:
    """The swings from `begin`, since when nothing was changed, to `end`, before which all requests are over.

    Args:
        records: of the requests that arrived meanwhile, in any order, and others.
    """
    slice_s = settings.slice_s
    count = min(_SLICES, int((end - begin) // slice_s))
    parts: list[list[RequestRecord]] = [[] for _ in range(max(0, count))]
    for record in records:
        place, into_s = divmod(record.arrived_at - (end - count * slice_s), slice_s)
        if 0 <= place < count and into_s >= settings.settle_s:
            parts[int(place)].append(record)
    rewards = [reward_of(part, objective) for part in parts]
    names = {name for reward in rewards for name in reward.classes}
    return Swings(
        reward=_swing([reward.value for reward in rewards]),
        attainment={
            name: _swing([_attainment(reward, name) for reward in rewards]) for name in sorted(names)
        },
    )


def _attainment(reward: Reward, name: str) -> float | None:
    figures = reward.classes.get(name)
    return None if figures is None else figures.attainment_ratio


def _swing(values: Sequence[float | None]) -> float:
    """Root mean square of the differences of neighbours that are both known; 0 without any."""
    squares = [
        (after - before) ** 2
        for before, after in itertools.pairwise(values)
        if before is not None and after is not None
    ]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0
