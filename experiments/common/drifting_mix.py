"""A Poisson stream of two kinds of requests, ordinary and long, whose shares change while the load stays.

The rate follows the mix: a request of the mix takes so many seconds of the whole fleet, and the load is the
share of the time that is taken. Between the two extreme mixes these seconds are interpolated.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.lab.simulation.batch import saturated_rate_of
from serve_app.lab.simulation.fleet import FleetSettings
from serve_app.lab.workloads.generators import stream
from serve_app.lab.workloads.trace import Trace, TraceRequest

MixPoints = tuple[tuple[float, float], ...]
"""(share of the time, share of long requests), with straight lines in between."""

LengthsOfKinds = Callable[[Sequence[bool], int], Iterable[tuple[int, int]]]
"""Draws prompt and output tokens for each kind (True is long), with a seed."""

# Requests of which the saturated rate of a mix is measured.
_BACKLOG = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRates:
    """Seconds of the whole fleet that a request takes, in the two extreme mixes of a stream.

    Attributes:
        low, high: smallest and largest share of long requests.
        low_s, high_s: seconds for each request at these shares.
    """

    low: float
    high: float
    low_s: float
    high_s: float

    def seconds(self, long_share: float) -> float:
        """For each request of a mix in between."""
        beyond = (long_share - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self.low_s + beyond * (self.high_s - self.low_s)


def mix_rates(points: MixPoints, lengths: LengthsOfKinds, fleet: FleetSettings) -> MixRates:
    """Measures the fleet at load 1.0 under both extreme mixes; two simulated runs."""
    shares = [share for _, share in points]
    low, high = min(shares), max(shares)
    seconds = {share: 1 / saturated_rate_of(fleet, _backlog(share, lengths)) for share in {low, high}}
    return MixRates(low=low, high=high, low_s=seconds[low], high_s=seconds[high])


def drifting_arrivals(
    points: MixPoints, rates: MixRates, load: float, duration_s: float, rng: np.random.Generator
) -> list[tuple[float, bool]]:
    """When requests arrive, and which of them are long."""
    at = 0.0
    arrivals: list[tuple[float, bool]] = []
    while True:
        share = long_share(points, at / duration_s)
        at += float(rng.exponential(rates.seconds(share) / load))
        if at >= duration_s:
            return arrivals
        arrivals.append((at, bool(rng.random() < share)))


def long_share(points: MixPoints, when: float) -> float:
    """The share of long requests at a share of the time."""
    for (t0, s0), (t1, s1) in itertools.pairwise(points):
        if when <= t1:
            return s0 if t1 == t0 else s0 + (s1 - s0) * (when - t0) / (t1 - t0)
    return points[-1][1]


def trace_of_kinds(
    name: str, arrivals: Sequence[tuple[float, bool]], lengths: LengthsOfKinds, seed: int
) -> Trace:
    """These arrivals with lengths by their kind."""
    drawn = lengths([is_long for _, is_long in arrivals], seed)
    requests = tuple(
        TraceRequest(arrival_s=at, prompt_tokens=prompt, output_tokens=output)
        for (at, _), (prompt, output) in zip(arrivals, drawn, strict=True)
    )
    return Trace(name=name, source=f"two kinds of requests, seed {seed}", requests=requests)


def _backlog(share: float, lengths: LengthsOfKinds) -> Trace:
    rng = stream(0, "backlog")
    arrivals = [(float(place), bool(rng.random() < share)) for place in range(_BACKLOG)]
    return trace_of_kinds("backlog", arrivals, lengths, 0)
