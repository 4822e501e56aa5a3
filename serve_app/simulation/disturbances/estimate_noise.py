"""Estimate noise: the scheduler sees wrong prompt lengths, while engines see the true ones."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random

from serve_app.request import Request
from serve_app.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthNoise:
    """The error of estimated prompt lengths.

    Attributes:
        relative_error: standard deviation of the logarithm of estimate over truth: at 0.3, two of three
            estimates are between 0.74 and 1.35 times the truth. The median estimate is right. 0 is exact.
    """

    relative_error: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.relative_error < math.inf:
            raise ValueError(f"relative_error must be 0 (exact) or more, got {self.relative_error}")

    def factors(self, request_ids: Iterable[str], rng: Random) -> dict[str, float]:
        """Estimate over truth for each request, drawn in the order given."""
        return {one: math.exp(rng.gauss(0.0, self.relative_error)) for one in request_ids}


class NoisyEstimator(TokenEstimator):
    """Multiplies each exact prompt length by the request's factor.

    Args:
        factors: estimate over truth, by request id.
    """

    def __init__(self, settings: EstimatorSettings, factors: Mapping[str, float]) -> None:
        super().__init__(settings)
        self._factors = factors

    def estimate(self, request: Request) -> TokenEstimate:
        """The exact estimate, times the factor of the request."""
        exact = super().estimate(request)
        factor = self._factors[request.request_id]
        seen = max(1, round(exact.expected_prompt_tokens * factor))
        # A real estimator keeps the lower bound below the truth, so that no request that fits is refused.
        least = min(seen, exact.least_prompt_tokens)
        return replace(exact, prompt_tokens=seen, expected_prompt_tokens=seen, least_prompt_tokens=least)
