"""What of the difference of two slices is the traffic's, and none of the candidate's?

Two neighbouring minutes meet other requests, and near saturation that alone makes rewards differ by many
times what a step changes. But the requests are known afterwards: the twin says what the values in force would
have made of each slice (`replay`). That depends on what arrived and not on which side served it, so to
subtract it, times any constant, from a slice's reward leaves the expected difference of the sides what it
is, *however wrong the twin is*: a wrong one only takes away less of the scatter. (Where clients come again
because they were served slowly, what arrives depends a little on who served.) Such a quantity is a control
variate: Lavenberg and Welch, Management Science 27, 1981; for experiments with users, Deng et al., WSDM 2013.

The constant is fitted to neighbouring slices of one side, of the time before the trial and of earlier
trials: the slope of what they differed by on what they were expected to, drawn towards 1 while there are few,
and kept within 0 and 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.tuning.online.slice_noise import Neighbours, SliceNoise, attainment, classes_of

_PRIOR_PAIRS = 2.0
"""Pairs of neighbours that a slope of 1 counts as: the twin is believed until some pairs speak against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """How much is subtracted, and how much slices of one side differ after that.

    Attributes:
        reward: share of the expected difference that is the traffic's, between 0 and 1.
        attainment: the same by class; classes that it lacks have 1.
        left: what neighbours differ by, once that is subtracted.
    """

    reward: float = 1.0
    attainment: Mapping[str, float] = field(default_factory=dict)
    left: SliceNoise = field(default_factory=SliceNoise)


def control_of(neighbours: Sequence[Neighbours]) -> Control:
    """The control that slices of one side suggest, as far as the twin was asked what it expected of them."""
    asked = [
        (before.reward, after.reward, before.expected, after.expected)
        for before, after in neighbours
        if before.expected is not None and after.expected is not None
    ]
    slope, left = _fit([tuple(reward.value for reward in rewards) for rewards in asked])
    classes = {
        name: _fit([tuple(attainment(reward, name) for reward in rewards) for rewards in asked])
        for name in classes_of(neighbours)
    }
    return Control(
        reward=slope,
        attainment={name: fitted[0] for name, fitted in classes.items()},
        left=SliceNoise(reward=left, attainment={name: fitted[1] for name, fitted in classes.items()}),
    )


def _fit(figures: Sequence[tuple[float | None, ...]]) -> tuple[float, float]:
    """Slope, and root mean square of what it leaves; 1 and 0 when nothing is known.

    Args:
        figures: of each pair of neighbours what was seen before and after, and what was expected of both.
    """
    pairs = [
        (seen_after - seen_before, after - before)
        for seen_before, seen_after, before, after in figures
        if seen_before is not None and seen_after is not None and before is not None and after is not None
    ]
    if not pairs:
        return 1.0, 0.0
    squares = math.fsum(told * told for _, told in pairs)
    prior = _PRIOR_PAIRS * squares / len(pairs)
    slope = 1.0
    if squares > 0:
        slope = (math.fsum(was * told for was, told in pairs) + prior) / (squares + prior)
        slope = min(1.0, max(0.0, slope))
    left = math.fsum((was - slope * told) ** 2 for was, told in pairs)
    return slope, math.sqrt(left / len(pairs))
