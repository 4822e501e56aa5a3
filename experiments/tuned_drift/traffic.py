"""The paper's mix as a Poisson stream whose share of long requests changes half-way at constant load.

The rate follows the mix: a request takes some seconds of the whole fleet, and the load is the busy share of
the time.
"""

from collections.abc import Sequence

from serve_app.lab.simulation.run import FleetSettings, saturated_rate_of
from serve_app.lab.workloads import LognormalLengths, Trace, TraceRequest, UniformLengths, stream

Halves = tuple[float, float]
"""Figures of the first and the second half of the time."""

_SHORT, _LONG = UniformLengths(32, 256), UniformLengths(1_024, 4_096)
_ANSWERS = LognormalLengths(mean=100, cv=0.5, max_tokens=512)
# Number of requests from which the saturated rate of a mix is measured.
_BACKLOG = 4_000


def seconds_of(long_shares: Halves, fleet: FleetSettings) -> Halves:
    """Return the fleet's seconds per request at load 1.0; runs two simulations."""
    before, after = (1 / saturated_rate_of(fleet, _backlog(share)) for share in long_shares)
    return before, after


def traffic(long_shares: Halves, seconds: Halves, load: float, duration_s: float, seed: int) -> Trace:
    """Return the requests of one run."""
    rng = stream(seed, "arrivals and kinds")
    at = 0.0
    arrivals: list[tuple[float, bool]] = []
    while True:
        half = at > duration_s / 2
        at += float(rng.exponential(seconds[half] / load))
        if at >= duration_s:
            return mixed(arrivals, seed)
        arrivals.append((at, bool(rng.random() < long_shares[half])))


def mixed(arrivals: Sequence[tuple[float, bool]], seed: int) -> Trace:
    """Return these arrivals with lengths of the paper's mix, by kind (True is long)."""
    short, long, answers = (
        lengths.sample(len(arrivals), stream(seed, name))
        for lengths, name in ((_SHORT, "short"), (_LONG, "long"), (_ANSWERS, "answers"))
    )
    requests = tuple(
        TraceRequest(
            arrival_s=at,
            prompt_tokens=int((long if is_long else short)[place]),
            output_tokens=int(answers[place]),
        )
        for place, (at, is_long) in enumerate(arrivals)
    )
    return Trace(name="drift", source=f"two kinds of requests, seed {seed}", requests=requests)


def _backlog(share: float) -> Trace:
    rng = stream(0, "backlog")
    return mixed([(float(place), bool(rng.random() < share)) for place in range(_BACKLOG)], 0)
