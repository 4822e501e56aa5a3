"""Lengths of the answers: given by the client, or drawn from a seeded log-normal distribution."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputLength:
    """Tokens of one answer, and why it ends: "stop", or "length" when a limit cut it."""

    tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWish:
    """What the client states about the length of its answer.

    Attributes:
        limit: the maximum, from `max_tokens` and the rest of the context.
        min_tokens: the minimum.
        ignore_eos: generate up to the limit.
        exact: `ewsjf_output_tokens`, the length in a trace.
    """

    limit: int
    min_tokens: int = 0
    ignore_eos: bool = False
    exact: int | None = None


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

    def draw(self, wish: LengthWish) -> OutputLength:
        """Length of one answer."""
        if wish.ignore_eos:
            return OutputLength(wish.limit, "length")
        if wish.exact is not None:
            tokens = wish.exact
        else:
            tokens = max(1, round(self._rng.lognormvariate(self._mu, self._sigma)))
        tokens = max(tokens, wish.min_tokens)
        if tokens > wish.limit:
            return OutputLength(wish.limit, "length")
        return OutputLength(tokens, "stop")
