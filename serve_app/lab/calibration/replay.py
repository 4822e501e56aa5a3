"""Replay of measured arrivals in the engine model, with the timings of both and their errors.

TTFT and E2E count from `queued_at`, so neither includes the time before the engine (network, tokenizer).

The error of a statistic (mean, median, p90 or p99) is `played / measured - 1`, of the whole distribution. It
is not the mean error of single requests, because a preemption may affect another request in the replay.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from serve_app.engines.model.model import EngineModel
from serve_app.engines.model.sequences import EngineModelSettings, EngineSequence
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.calibration.measurements import MeasuredRequest

# Longest run of pure decode iterations that the model computes at once.
_MAX_STEPS = 1_000_000

Floats = NDArray[np.float64]
Part = slice | list[int]
"""Some of a run's requests, by their indices."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of requests, in seconds and in the order of the requests.

    Attributes:
        ttft_s: first token - queued.
        tpot_s: (last token - first token) / (output tokens - 1); only of requests with two tokens or more.
        e2e_s: last token - queued.
        preemptions: in the replay; 0 in a measurement, which does not contain them.
    """

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    preemptions: int = 0


def measured(requests: Sequence[MeasuredRequest]) -> Timings:
    """Return the timings of real requests."""
    first = np.array([request.first_token_at for request in requests])
    last = np.array([request.last_token_at for request in requests])
    return _timings(requests, first, last)


def replay(
    requests: Sequence[MeasuredRequest],
    settings: EngineModelSettings,
    step_time: StepTimeModel,
    *,
    part: Part = slice(None),
) -> Timings:
    """Play all requests through the engine model, and return the timings of a part of them.

    Args:
        requests: in order of arrival; of their timestamps only `queued_at` is used.
        part: the requests whose timings are returned.
    """
    # Use a clock that starts near 0, because small steps would be lost in the rounding of large timestamps.
    origin = requests[0].queued_at
    sequences = [_sequence(number, request, origin) for number, request in enumerate(requests)]
    model = EngineModel(settings, step_time)
    for arrived_at, together in itertools.groupby(sequences, key=lambda sequence: sequence.arrived_at):
        _advance(model, arrived_at)
        for sequence in together:
            model.add(sequence, arrived_at)
        if model.ends_at is None:
            model.begin_step(arrived_at, max_steps=_MAX_STEPS)
    _advance(model, float("inf"))
    first = np.array([_instant(sequence.first_token_at) for sequence in sequences]) + origin
    last = np.array([_instant(sequence.finished_at) for sequence in sequences]) + origin
    preemptions = sum(sequence.preemptions for sequence in sequences)
    return _timings(chosen(requests, part), first[part], last[part], preemptions)


def chosen(requests: Sequence[MeasuredRequest], part: Part) -> Sequence[MeasuredRequest]:
    """Return a part of the requests."""
    return requests[part] if isinstance(part, slice) else [requests[index] for index in part]


def _sequence(number: int, request: MeasuredRequest, origin: float) -> EngineSequence:
    return EngineSequence(
        str(number), request.prompt_tokens, request.output_tokens, request.queued_at - origin
    )


def _advance(model: EngineModel, until: float) -> None:
    """Run the engine until `until`. A step that ends at that instant remains open for arrivals then."""
    while model.ends_at is not None and model.ends_at < until:
        ended_at = model.end_step().ended_at
        model.begin_step(ended_at, max_steps=_MAX_STEPS)


def _instant(instant: float | None) -> float:
    assert instant is not None, "every request ends in a replay"
    return instant


def _timings(
    requests: Sequence[MeasuredRequest], first: Floats, last: Floats, preemptions: int = 0
) -> Timings:
    queued = np.array([request.queued_at for request in requests])
    output_tokens = np.array([request.output_tokens for request in requests])
    several = output_tokens > 1
    tpot = (last - first)[several] / (output_tokens[several] - 1)
    return Timings(first - queued, tpot, last - queued, preemptions)


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
        """Relative errors, positive if the model is too slow."""
        simulated, observed = asdict(self.played), asdict(self.measured)
        return Statistics(**{name: simulated[name] / observed[name] - 1.0 for name in simulated})


def compare(played: Timings, measured: Timings) -> dict[str, Accuracy]:
    """Return the accuracy of each metric by name, without metrics that no request has."""
    found = {}
    for metric in METRICS:
        simulated, observed = getattr(played, metric), getattr(measured, metric)
        if len(observed):
            found[metric] = Accuracy(_statistics(observed), _statistics(simulated))
    return found


def _statistics(values: Floats) -> Statistics:
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Statistics(float(values.mean()), p50, p90, p99)
