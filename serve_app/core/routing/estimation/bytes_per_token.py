"""Bytes per token of a model's tokenizer, learned for each category of text.

These are the exponential averages of the pool-routing paper (arXiv 2604.09613), learned from the token counts
that engines report:

    c     <- b * c + (1 - b) * c_obs              c_obs = bytes / tokens of one prompt
    sigma <- b * sigma + (1 - b) * |c_obs - c|
    c*     = c - gamma * sigma                    an upper estimate of the tokens

with four additions:

- **Warm-up.** b is n / (n + 1) until that reaches beta, with n the weight so far. This is the plain average
  of the first observations and the cold-start value, so a few requests correct a wrong start.
- **Deviation before mean.** |c_obs - c| uses the mean before the update. It is then the error of the forecast
  that was made, which the margin must cover (as in TCP's round-trip estimate, RFC 6298).
- **Weight.** A short text is less informative, and the tokens of the chat template distort it. An observation
  of fewer than `full_weight_tokens` moves the averages in proportion to its length.
- **Limits.** An observation further than `_OUTLIER_FACTOR` from the mean counts as one at that distance.
  Examples are a prompt of 10,000 blanks, or one that the engine truncated. c* never falls below
  `floor_bytes_per_token`: tokenizers that work on bytes use at most one token per byte.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from serve_app.core.routing.snapshot import Snapshot, number
from serve_app.core.settings_base import INNER_SHARE, NOT_NEGATIVE, POSITIVE, settings
from serve_app.request import TextCategory

# Standard deviation in mean absolute deviations of a normal distribution: sqrt(pi / 2).
_STANDARD_PER_MEAN_ABSOLUTE = 1.2533
_MIN_MEAN = 0.01  # bytes per token; no tokenizer comes near

# Means over three tokenizer families (49 k, 32 k and 131 k entries), rounded down, because too many tokens is
# the safer error before the first observation. See experiments/estimator.
_COLD_START = {
    TextCategory.PROSE: 3.9,
    TextCategory.CODE: 3.2,
    TextCategory.CJK: 2.0,
    TextCategory.NUMERIC: 1.15,
    TextCategory.MIXED: 2.3,
}
# Minimum deviation, as a share of the mean: after many similar requests the next one may still differ.
_MIN_DEVIATION_RATIO = 0.03
# The lower bound of the tokens assumes this many times the mean bytes per token. It decides which requests
# are rejected as too long, so it is wide: an engine rejects wrongly admitted ones by an exact count.
_OPTIMISTIC_FACTOR = 2.5
# Weight of the cold-start mean, in observations.
_COLD_WEIGHT = 2.0
# An observation more than this factor from the mean counts as one at that distance.
_OUTLIER_FACTOR = 3.0


@settings(block="estimator")
class EstimatorSettings:
    """Learning of bytes per token, for all text categories of a model."""

    # Memory of the averages: 0.95 follows a change of traffic within about 60 requests. Higher is steadier
    # and slower, without a gain while traffic stays the same (experiments/estimator).
    beta: Annotated[float, INNER_SHARE.hint("0.95 is usual")] = 0.95
    # Margin in mean absolute deviations. Higher sends fewer requests to a pool that is too short for them,
    # and more to the long pool that would have fitted the short one (experiments/estimator has the figures).
    gamma: Annotated[float, NOT_NEGATIVE] = 1.0
    # Bytes per token before the first observation, by category of text.
    cold_bytes_per_token: Mapping[TextCategory, float] = field(default_factory=lambda: dict(_COLD_START))
    # The same for JSON schemas of tools.
    cold_tool_bytes_per_token: Annotated[float, POSITIVE] = 3.5
    # Deviation before the first observation, as a share of the cold-start mean: about that between
    # tokenizers.
    cold_deviation_ratio: Annotated[float, NOT_NEGATIVE] = 0.15
    # Texts of at least this many tokens count in full. Higher is no more accurate, and slower after a change.
    full_weight_tokens: Annotated[int, POSITIVE] = 64
    # Lower bound of the bytes per token in the upper estimate. Numbers use little more than one byte per
    # token.
    floor_bytes_per_token: Annotated[float, POSITIVE] = 1.0

    def __post_init__(self) -> None:
        for category in TextCategory:
            value = self.cold_bytes_per_token.get(category)
            if value is None or not value > 0:
                raise ValueError(
                    f"cold_bytes_per_token.{category.value} must be a positive number, got {value}"
                )


class BytesPerToken:
    """The learned ratio of one category of text.

    Attributes:
        mean: c, bytes per token.
        deviation: sigma, mean absolute error of the forecast, in bytes per token.
        weight: observations so far, including the cold start; capped at the end of the warm-up.
    """

    __slots__ = ("_settings", "deviation", "mean", "weight")

    def __init__(self, settings: EstimatorSettings, cold_start: float) -> None:
        self._settings = settings
        self.mean = cold_start
        self.deviation = cold_start * settings.cold_deviation_ratio
        self.weight = _COLD_WEIGHT

    def __repr__(self) -> str:
        return f"<BytesPerToken {self.mean:.3f} +- {self.deviation:.3f}>"

    @property
    def unbiased(self) -> float:
        """The divisor that gives unbiased token counts.

        The mean ratio gives too few: the mean of 1 / c is larger than 1 / mean(c), to second order by the
        squared coefficient of variation.
        """
        variation = _STANDARD_PER_MEAN_ABSOLUTE * self.deviation / self.mean
        return self.mean / (1 + variation * variation)

    @property
    def conservative(self) -> float:
        """c*, the divisor for the upper estimate of the tokens; never above `unbiased`."""
        settings = self._settings
        deviation = max(self.deviation, _MIN_DEVIATION_RATIO * self.mean)
        lower = max(settings.floor_bytes_per_token, self.mean - settings.gamma * deviation)
        return min(self.unbiased, lower)

    @property
    def optimistic(self) -> float:
        """The divisor for the lower bound of the tokens."""
        return self.mean * _OPTIMISTIC_FACTOR

    def standard_error(self, size_bytes: float) -> float:
        """Return the standard deviation of the estimated tokens of a text."""
        return _STANDARD_PER_MEAN_ABSOLUTE * self.deviation * size_bytes / (self.mean * self.mean)

    def observe(self, size_bytes: float, tokens: float) -> None:
        """Learn from a text of `size_bytes` that had `tokens`. Impossible values are ignored."""
        if size_bytes <= 0 or tokens <= 0:
            return
        settings = self._settings
        observed = min(max(size_bytes / tokens, self.mean / _OUTLIER_FACTOR), self.mean * _OUTLIER_FACTOR)
        weight = min(1.0, tokens / settings.full_weight_tokens)
        step = max(weight * (1 - settings.beta), weight / (self.weight + weight))
        self.deviation += step * (abs(observed - self.mean) - self.deviation)
        # Counts that no tokenizer produces must not lead to a state that `restore` rejects.
        self.mean = max(_MIN_MEAN, self.mean + step * (observed - self.mean))
        # Beyond this weight the warm-up is over.
        self.weight = min(self.weight + weight, 1 / (1 - settings.beta))

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {"mean": self.mean, "deviation": self.deviation, "weight": self.weight}

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        mean = number(state, "mean", at_least=_MIN_MEAN)
        deviation, weight = number(state, "deviation", at_least=0), number(state, "weight", at_least=0)
        self.mean, self.deviation, self.weight = mean, deviation, weight
