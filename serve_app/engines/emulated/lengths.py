"""Lengths of the answers: given by the client, or drawn from a seeded log-normal distribution."""

import math
import random
from dataclasses import dataclass

from serve_app.engines.emulated.requests import Generation


@dataclass(frozen=True, slots=True)
class OutputLength:
    """Tokens of one answer, and why it ends: "stop", or "length" when a limit cut it."""

    tokens: int
    finish_reason: str


class OutputLengthSampler:
    """Draws answer lengths.

    Args:
        mean_tokens: mean of the distribution before limits.
        sigma: standard deviation of its logarithm; 0 makes every answer `mean_tokens` long.
        rng: source of randomness.
    """

    def __init__(self, mean_tokens: float, sigma: float, rng: random.Random) -> None:
        self._mu = math.log(mean_tokens) - sigma * sigma / 2.0
        self._sigma = sigma
        self._rng = rng

    def draw(self, generation: Generation, limit: int) -> OutputLength:
        """The length of one answer to a request, of at most `limit` tokens."""
        if generation.ignore_eos:
            return OutputLength(limit, "length")
        tokens = generation.exact_output_tokens
        if tokens is None:
            tokens = max(1, round(self._rng.lognormvariate(self._mu, self._sigma)))
        tokens = max(tokens, generation.min_tokens)
        return OutputLength(limit, "length") if tokens > limit else OutputLength(tokens, "stop")
