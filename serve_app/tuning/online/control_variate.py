"""Control variates: the part of the difference of two slices that is due to the traffic, not the candidate.

Two neighbouring minutes meet different requests, and near saturation that alone makes rewards differ by many
times the effect of a step. But the requests are known afterwards, so the twin can say what the values in
force would have made of each slice (`replay`). That expectation depends on what arrived and not on which side
served it. So subtracting it, times any constant, leaves the expected difference of the sides as it is,
*however wrong the twin is*: a wrong twin only removes less of the scatter. One reservation: where clients
retry because they were served slowly, what arrives depends a little on who served.

Such a quantity is a control variate: Lavenberg and Welch, Management Science 27, 1981; for experiments with
users, Deng et al., WSDM 2013.

The constant is fitted to neighbouring slices of one side, from before the trial and from earlier trials. It
is the slope of their differences on the expected differences, drawn towards 1 while there are few, and kept
between 0 and 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.tuning.online.slice_noise import Neighbours, SliceNoise, attainment, classes_of

_PRIOR_PAIRS = 2.0
"""Pairs of neighbours that a slope of 1 counts as: the twin is believed until some pairs contradict it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlVariate:
    """How much of an expected difference is subtracted, and the noise that is left after that.

    Attributes:
        reward: slope of the reward, between 0 and 1.
        attainment: slope of the attainment by class; classes that it lacks have 1.
        residual: slice noise after the subtraction.
    """

    reward: float = 1.0
    attainment: Mapping[str, float] = field(default_factory=dict)
    residual: SliceNoise = field(default_factory=SliceNoise)


def control_of(neighbours: Sequence[Neighbours]) -> ControlVariate:
    """The control variate that fits slices of one side; those without an expectation do not count."""
    asked = [
        (before.reward, after.reward, before.expected, after.expected)
        for before, after in neighbours
        if before.expected is not None and after.expected is not None
    ]
    slope, residual = _fit([tuple(reward.value for reward in rewards) for rewards in asked])
    classes = {
        name: _fit([tuple(attainment(reward, name) for reward in rewards) for rewards in asked])
        for name in classes_of(neighbours)
    }
    return ControlVariate(
        reward=slope,
        attainment={name: fitted[0] for name, fitted in classes.items()},
        residual=SliceNoise(
            reward=residual, attainment={name: fitted[1] for name, fitted in classes.items()}
        ),
    )


def _fit(figures: Sequence[tuple[float | None, ...]]) -> tuple[float, float]:
    """The slope, and the root mean square of the residuals; 1 and 0 without data.

    Args:
        figures: for each pair of neighbours, the two measured values, then the two expected ones.
    """
    pairs = [
        (measured_after - measured_before, expected_after - expected_before)
        for measured_before, measured_after, expected_before, expected_after in figures
        if measured_before is not None and measured_after is not None
        if expected_before is not None and expected_after is not None
    ]
    if not pairs:
        return 1.0, 0.0
    squares = math.fsum(expected * expected for _, expected in pairs)
    prior = _PRIOR_PAIRS * squares / len(pairs)
    slope = 1.0
    if squares > 0:
        slope = (math.fsum(measured * expected for measured, expected in pairs) + prior) / (squares + prior)
        slope = min(1.0, max(0.0, slope))
    residuals = math.fsum((measured - slope * expected) ** 2 for measured, expected in pairs)
    return slope, math.sqrt(residuals / len(pairs))
