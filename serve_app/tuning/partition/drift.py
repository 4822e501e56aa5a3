"""The drift test: whether prompts still have the lengths from which the queues were learned.

It is a two-sample Kolmogorov-Smirnov test. The statistic D is the largest difference between the two
empirical distribution functions: the largest share of requests that moved across some length. The lengths
have drifted when both conditions hold:

- **The shift matters**: D is at least `min_shift`. With enough requests any difference becomes significant,
  so this condition keeps small ones from starting a new run.
- **The shift is significant**: so large a D has a probability of at most `significance` under equal
  distributions (asymptotic, with the correction of Stephens, 1970). Ties make the test more conservative.

What it cannot see: a few very long prompts are much work but a small share of the requests. They get bubble
queues until the next run by interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from serve_app.settings_base import INNER_SHARE, at_least, settings

_TERMS = 100
"""Terms of Kolmogorov's series; in the range used here they vanish far earlier."""
_MIN_ARGUMENT = 0.3
"""Below it the probability is 1 to six places, and the series converges slowly."""


@settings(block="drift")
class DriftSettings:
    """When to say that lengths have drifted."""

    # Share of requests that moved across some length. Queues are 20 % wide and routing bridges another 10 %,
    # so a smaller shift changes the queue of few. Lower follows traffic faster and re-routes more often.
    min_shift: Annotated[float, INNER_SHARE] = 0.1
    # Chance of a false alarm per test. Real arrivals are bursty, so samples vary more than independent ones.
    significance: Annotated[float, INNER_SHARE] = 0.001
    # Lengths in either sample; fewer say nothing.
    min_sample: Annotated[int, at_least(1).hint("200 is usual")] = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The result of the test.

    Attributes:
        drifted: whether queues should be learned again.
        shift: D, the largest share of requests that moved across some length; 0 to 1.
        p_value: probability of such a shift between two samples of the same traffic.
        at_tokens: the length across which they moved; the shortest of several.
        enough: whether both samples were large enough; if not, nothing has drifted.
    """

    drifted: bool
    shift: float
    p_value: float
    at_tokens: int
    enough: bool


def has_drifted(
    reference: Sequence[int] | npt.NDArray[np.integer],
    recent: Sequence[int] | npt.NDArray[np.integer],
    settings: DriftSettings,
) -> Drift:
    """Compare the lengths that queues were learned from with those that arrive now."""
    before, now = np.sort(np.asarray(reference)), np.sort(np.asarray(recent))
    if min(len(before), len(now)) < settings.min_sample:
        return Drift(drifted=False, shift=0.0, p_value=1.0, at_tokens=0, enough=False)
    shift, at_tokens = _largest_shift(before, now)
    p_value = kolmogorov_p_value(shift, len(before), len(now))
    return Drift(
        drifted=shift >= settings.min_shift and p_value <= settings.significance,
        shift=shift,
        p_value=p_value,
        at_tokens=at_tokens,
        enough=True,
    )


def _largest_shift(before: npt.NDArray[np.integer], now: npt.NDArray[np.integer]) -> tuple[float, int]:
    """D of two sorted samples, and the first length at which it is reached."""
    lengths = np.union1d(before, now)
    share_before = np.searchsorted(before, lengths, side="right") / len(before)
    share_now = np.searchsorted(now, lengths, side="right") / len(now)
    differences = np.abs(share_before - share_now)
    widest = int(np.argmax(differences))
    return float(differences[widest]), int(lengths[widest])


def kolmogorov_p_value(shift: float, first_count: int, second_count: int) -> float:
    """Probability that two samples of one continuous distribution differ by `shift` or more."""
    root = math.sqrt(first_count * second_count / (first_count + second_count))
    argument = (root + 0.12 + 0.11 / root) * shift
    if argument < _MIN_ARGUMENT:
        return 1.0
    terms = (math.exp(-2 * (term * argument) ** 2) for term in range(1, _TERMS))
    series = sum(size if index % 2 == 0 else -size for index, size in enumerate(terms))
    return min(1.0, max(0.0, 2 * series))
