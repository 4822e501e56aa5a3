"""The accuracy of a replay: the errors of statistics of its latencies against the measured ones.

The error of a statistic (mean, median, p90 or p99) is `played / measured - 1`, of the whole distribution. It
is not the mean error of single requests, because a preemption may hit another request in the replay.
"""

from dataclasses import asdict, dataclass

import numpy as np

from serve_app.calibration.replay import Floats, Timings

METRICS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one metric over some requests, in seconds or as relative errors."""

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
    """The accuracy of each metric by its name, without metrics that no request has."""
    found = {}
    for metric in METRICS:
        ours, theirs = getattr(played, metric), getattr(measured, metric)
        if len(theirs):
            found[metric] = Accuracy(_statistics(theirs), _statistics(ours))
    return found


def _statistics(values: Floats) -> Statistics:
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Statistics(float(values.mean()), p50, p90, p99)
