"""Tokens of media in a prompt.

Images, audio and files are counted as items, because their bytes do not determine their tokens. An image has
576 tokens with one model, and up to 16,000, growing with its size, with another. The mean is learned from
prompts that are mostly media.
"""

import math

from serve_app.core.routing.snapshot import Snapshot, number

# Memory of the mean.
_STEP = 0.05
_COLD_WEIGHT = 1.0
_OUTLIER = 20.0  # a page of documents after many thumbnails
# An image or audio clip before the first observation: LLaVA 576, Qwen-VL up to 16 k.
_ITEM_TOKENS = 1024.0


class MediaTokens:
    """The learned tokens of one image, sound or file.

    Attributes:
        mean: tokens per item.
        deviation: mean absolute error of the forecast, in tokens per item; 0 before any was observed.
    """

    __slots__ = ("_weight", "deviation", "mean")

    def __init__(self) -> None:
        self.mean = _ITEM_TOKENS
        self.deviation = 0.0
        self._weight = _COLD_WEIGHT

    def __repr__(self) -> str:
        return f"<MediaTokens {self.mean:.0f} +- {self.deviation:.0f}>"

    def observe(self, items: int, tokens: float) -> None:
        """Learn that `items` items had `tokens`, without the rest of their prompt."""
        if items <= 0 or not math.isfinite(tokens):
            return
        observed = min(max(0.0, tokens / items), max(1.0, self.mean) * _OUTLIER)
        step = max(_STEP, 1 / (self._weight + 1))
        self.deviation += step * (abs(observed - self.mean) - self.deviation)
        self.mean += step * (observed - self.mean)
        self._weight = min(self._weight + 1, 1 / _STEP)

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {"mean": self.mean, "deviation": self.deviation, "weight": self._weight}

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        mean, deviation = number(state, "mean", at_least=0), number(state, "deviation", at_least=0)
        weight = number(state, "weight", at_least=0)
        self.mean, self.deviation, self._weight = mean, deviation, weight
