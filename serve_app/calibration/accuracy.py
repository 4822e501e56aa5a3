"""How far are the played distributions from the measured ones?

An error is that of a statistic of the distribution: the mean (or median, p90, p99) of what the model played
against the same statistic of what was measured, `played / measured - 1`. It is not the mean of the errors of
single requests, which preemptions exchange among neighbours.
"""

from dataclasses import asdict, dataclass

import numpy as np

from serve_app.calibration.replay import Floats, Timings

METRICS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one metric over some requests."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One metric, measured and played, both in seconds."""

    measured: Statistics
    played: Statistics

    @property
    def errors(self) -> Statistics:
        """Relative errors, positive where the model is too slow."""
        ours, theirs = asdict(self.played), asdict(self.measured)
        return Statistics(**{name: ours[name] / theirs[name] - 1.0 for name in ours})


def compare(played: Timings, measured: Timings) -> dict[str, Accuracy]:
    """The accuracy of each metric, by its name; metrics that no request has are left out."""
    found = {}
    for metric in METRICS:
        ours, theirs = getattr(played, metric), getattr(measured, metric)
        if len(theirs):
            found[metric] = Accuracy(_statistics(theirs), _statistics(ours))
    return found


def _statistics(values: Floats) -> Statistics:
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Statistics(float(values.mean()), p50, p90, p99)
