"""Tokens of a prompt in addition to its text: chat template and media.

The chat template adds tokens to every message (role, separators) and to every request (the start of the
answer, perhaps a default system prompt). Both are constants of the model, and are learned:

    tokens beyond the text = per_request + per_message * messages

The estimator is a Kalman filter of these two unknowns. An observation is the prompt's actual length minus the
estimated text, and its noise is the error of that estimate. Short prompts are therefore very informative, and
long ones hardly. If all chats have one message, the filter learns only the sum of the two, which is
sufficient for such chats.

Images, audio and files are counted as items, because their bytes do not determine their tokens. An image has
576 tokens with one model, and up to 16,000, growing with its size, with another. The mean is learned from
prompts that are mostly media.

Outliers: a difference above four standard deviations is clipped there, and increases the variances. So one
odd report has little effect, and a template that really differs is learned within a few reports.
"""

import math

from serve_app.core.routing.snapshot import Snapshot, number

_OUTLIER = 4.0  # standard deviations
_INFLATION = 4.0  # factor on the variances after an outlier
_ROUNDING_VARIANCE = 1.0  # tokens^2: text and template may share a token
# Variance added per observation, so that the filter continues to learn (for example a new template after an
# update).
_REQUEST_DRIFT = 0.01
_MESSAGE_DRIFT = 0.0005
# Memory of the mean of media items, as that of bytes per token.
_MEDIA_STEP = 0.05
_MEDIA_COLD_WEIGHT = 1.0
_MEDIA_OUTLIER = 20.0  # a page of documents after many thumbnails
# Templates with a default system prompt add 20 to 40 tokens, others about 4.
_REQUEST_TOKENS = 16.0
# <|im_start|>, role, line end, <|im_end|>, line end.
_MESSAGE_TOKENS = 5.0
# Standard deviations of these two. Higher learns sooner from the first observations.
_REQUEST_DEVIATION_TOKENS, _MESSAGE_DEVIATION_TOKENS = 16.0, 2.0
# A prompt without messages: the begin-of-text token, whether or not the tokenizer adds one.
_PLAIN_TOKENS = 1.0
# An image or audio clip before the first observation: LLaVA 576, Qwen-VL up to 16 k.
_MEDIA_ITEM_TOKENS = 1024.0


class TemplateOverhead:
    """The learned overhead of one model's chat template, in tokens."""

    __slots__ = ("_covariance", "_message_variance", "_request_variance", "per_message", "per_request")

    def __init__(self) -> None:
        self.per_request = _REQUEST_TOKENS
        self.per_message = _MESSAGE_TOKENS
        self._request_variance = _REQUEST_DEVIATION_TOKENS**2
        self._message_variance = _MESSAGE_DEVIATION_TOKENS**2
        self._covariance = 0.0

    def __repr__(self) -> str:
        return f"<TemplateOverhead {self.per_request:.1f} + {self.per_message:.1f} per message>"

    def tokens(self, messages: int) -> float:
        """Return the mean overhead of a prompt with `messages` messages; 0 means a plain completion."""
        if messages <= 0:
            return _PLAIN_TOKENS
        return max(0.0, self.per_request + self.per_message * messages)

    def deviation(self, messages: int) -> float:
        """Return the standard deviation of `tokens(messages)`."""
        return math.sqrt(self._variance(messages)) if messages > 0 else 0.0

    def observe(self, messages: int, tokens: float, deviation: float) -> None:
        """Learn that a chat of `messages` had `tokens` beyond its text, with an error of `deviation`."""
        if messages <= 0 or not math.isfinite(tokens):
            return
        variance = self._variance(messages) + deviation * deviation + _ROUNDING_VARIANCE
        innovation = tokens - self.per_request - self.per_message * messages
        limit = _OUTLIER * math.sqrt(variance)
        request_gain = (self._request_variance + messages * self._covariance) / variance
        message_gain = (self._covariance + messages * self._message_variance) / variance
        clipped = min(max(innovation, -limit), limit)
        self.per_request += request_gain * clipped
        self.per_message += message_gain * clipped
        if clipped == innovation:
            self._reduce_variances(request_gain, message_gain, variance)
        else:
            self._scale_variances(_INFLATION)

    def _variance(self, messages: int) -> float:
        spread = self._request_variance + messages * (
            2 * self._covariance + messages * self._message_variance
        )
        return max(0.0, spread)  # rounding may take the difference of large numbers just below zero

    def _reduce_variances(self, request_gain: float, message_gain: float, variance: float) -> None:
        self._request_variance += _REQUEST_DRIFT - request_gain * request_gain * variance
        self._message_variance += _MESSAGE_DRIFT - message_gain * message_gain * variance
        self._covariance -= request_gain * message_gain * variance
        self._scale_variances(1.0)

    def _scale_variances(self, factor: float) -> None:
        """Multiply the variances, and clip them between the drift and their initial values."""
        first, second = _REQUEST_DEVIATION_TOKENS**2, _MESSAGE_DEVIATION_TOKENS**2
        self._request_variance = min(max(self._request_variance * factor, _REQUEST_DRIFT), first)
        self._message_variance = min(max(self._message_variance * factor, _MESSAGE_DRIFT), second)
        # |covariance| may not exceed the geometric mean, or some number of messages has a negative variance.
        bound = math.sqrt(self._request_variance * self._message_variance)
        self._covariance = min(max(self._covariance * factor, -bound), bound)

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {
            "per_request": self.per_request,
            "per_message": self.per_message,
            "request_variance": self._request_variance,
            "message_variance": self._message_variance,
            "covariance": self._covariance,
        }

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        per_request, per_message = number(state, "per_request"), number(state, "per_message")
        request_variance = number(state, "request_variance", at_least=0)
        message_variance = number(state, "message_variance", at_least=0)
        covariance = number(state, "covariance")
        if covariance * covariance > request_variance * message_variance * 1.001:
            raise ValueError(f"learned state: covariance {covariance} is inconsistent with {dict(state)}")
        self.per_request, self.per_message, self._covariance = per_request, per_message, covariance
        self._request_variance, self._message_variance = request_variance, message_variance


class MediaTokens:
    """The learned tokens of one image, sound or file.

    Attributes:
        mean: tokens per item.
        deviation: mean absolute error of the forecast, in tokens per item; 0 before any was observed.
    """

    __slots__ = ("_weight", "deviation", "mean")

    def __init__(self) -> None:
        self.mean = _MEDIA_ITEM_TOKENS
        self.deviation = 0.0
        self._weight = _MEDIA_COLD_WEIGHT

    def __repr__(self) -> str:
        return f"<MediaTokens {self.mean:.0f} +- {self.deviation:.0f}>"

    def observe(self, items: int, tokens: float) -> None:
        """Learn that `items` items had `tokens`, without the rest of their prompt."""
        if items <= 0 or not math.isfinite(tokens):
            return
        observed = min(max(0.0, tokens / items), max(1.0, self.mean) * _MEDIA_OUTLIER)
        step = max(_MEDIA_STEP, 1 / (self._weight + 1))
        self.deviation += step * (abs(observed - self.mean) - self.deviation)
        self.mean += step * (observed - self.mean)
        self._weight = min(self._weight + 1, 1 / _MEDIA_STEP)

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {"mean": self.mean, "deviation": self.deviation, "weight": self._weight}

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        mean, deviation = number(state, "mean", at_least=0), number(state, "deviation", at_least=0)
        weight = number(state, "weight", at_least=0)
        self.mean, self.deviation, self._weight = mean, deviation, weight
