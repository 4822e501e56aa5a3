"""Disturbances of a run: wrong estimates of prompt lengths, and a mix that changes half-way."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import Trace, TraceError, TraceRequest, plain_stream, stream
from serve_app.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthNoise:
    """Error of estimated prompt lengths.

    Attributes:
        relative_error: standard deviation of the logarithm of estimate over truth: at 0.3, two of three
            estimates are between 0.74 and 1.35 times the truth. The median estimate is right. 0 is exact.
    """

    relative_error: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.relative_error < math.inf:
            raise ValueError(f"relative_error must be 0 (exact) or more, got {self.relative_error}")

    def estimator(
        self, settings: EstimatorSettings, requests: Sequence[SimulatedRequest], seed: int
    ) -> TokenEstimator:
        """Return an estimator with this error."""
        ids = (simulated.request.request_id for simulated in requests)
        return NoisyEstimator(settings, self.factors(ids, plain_stream(seed, "length noise")))

    def factors(self, request_ids: Iterable[str], rng: Random) -> dict[str, float]:
        """Return estimate over truth for each request, drawn in the order given."""
        return {one: math.exp(rng.gauss(0.0, self.relative_error)) for one in request_ids}


class NoisyEstimator(TokenEstimator):
    """Estimator that multiplies each exact prompt length by the request's factor: estimate over truth."""

    def __init__(self, settings: EstimatorSettings, factors: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._factors = factors

    def estimate(self, request: Request) -> TokenEstimate:
        """Return the exact estimate, times the factor of the request."""
        exact = super().estimate(request)
        factor = self._factors[request.request_id]
        seen = max(1, round(exact.expected_prompt_tokens * factor))
        # A real estimator's lower bound is below the truth, so that no request that fits is rejected.
        least = min(seen, exact.least_prompt_tokens)
        return replace(exact, prompt_tokens=seen, expected_prompt_tokens=seen, least_prompt_tokens=least)


@dataclass(frozen=True, slots=True)
class FlippedMix:
    """Exchange of the shares of short and long prompts in the second half of a trace.

    Attributes:
        short_at_tokens: longest prompt that counts as short.
    """

    short_at_tokens: int

    def __call__(self, trace: Trace, seed: int) -> Trace:
        """Return the trace of a seed with the exchange."""
        return with_flipped_mix(trace, self.short_at_tokens, stream(seed, "flip"))


def with_flipped_mix(trace: Trace, short_at_tokens: int, rng: np.random.Generator) -> Trace:
    """Exchange the shares of short and long prompts in the second half of a trace.

    Args:
        short_at_tokens: longest prompt that counts as short.

    Raises:
        TraceError: all prompts are of one kind.
    """
    short = [one for one in trace.requests if one.prompt_tokens <= short_at_tokens]
    long = [one for one in trace.requests if one.prompt_tokens > short_at_tokens]
    if not short or not long:
        raise TraceError(
            f"cannot flip the mix: all prompts of {trace.name!r} are on one side of {short_at_tokens} tokens"
        )
    middle = len(trace.requests) // 2
    flipped = trace.requests[:middle] + tuple(
        _sized_like(one, long if one.prompt_tokens <= short_at_tokens else short, rng)
        for one in trace.requests[middle:]
    )
    return replace(trace, requests=flipped, source=f"{trace.source}, mix flipped from request {middle:,} on")


def _sized_like(one: TraceRequest, models: list[TraceRequest], rng: np.random.Generator) -> TraceRequest:
    model = models[int(rng.integers(len(models)))]
    return replace(
        one, prompt_tokens=model.prompt_tokens, output_tokens=model.output_tokens, prefix=model.prefix
    )
