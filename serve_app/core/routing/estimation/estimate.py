"""Token estimates of requests without a tokenizer.

- `TokenEstimator`: the prompt, the output and the token budget of a request.
- `PromptLength`: the learned tokens of prompts, by a linear model of byte classes; `MediaTokens`: of media.

    prompt = text, tools and chat template (`PromptLength`) + media
    budget = prompt (upper estimate) + maximum output

`PromptLength`, `MediaTokens` and `output_length` learn the parts from the token counts that engines report.
One count cannot separate media from the rest, so prompts with media teach nothing about text, and media learn
if they are at least half of the prompt.

Source: token-budget pool routing (arXiv 2604.09613). Ours: chat templates, tools, lengths learned for
requests without `max_tokens`, and three numbers for the prompt. Routing uses the upper estimate, KV
accounting the mean, and admission the lower bound.

`MediaTokens`. Images, audio and files are counted as items, because their bytes do not determine their
tokens. An image has 576 tokens with one model, and up to 16,000, growing with its size, with another. The
mean is learned from prompts that are mostly media.

`PromptLength`. The length of a prompt without media is:

    tokens = sum over byte classes of  weight * bytes
             + weight * bytes of tool definitions
             + tokens per chat + tokens per message * messages

The weights are constants of a model: its tokenizer and its chat template. All are learned together by
recursive least squares, in the form of a Kalman filter, so each observation teaches the classes that it
consists of. The filter knows the covariance of its weights. So the margin of an upper estimate consists of
what is measured, and not of an assumed share:

    upper = expected + margin * sqrt(x' P x + (deviation * tokens)^2)

with x the sizes of a prompt, P the covariance of the weights, and the deviation of a text category: the
relative error of single prompts that remains with known weights. The first term covers scripts that were
never observed, and the second one texts that differ.

- **Cold start.** The prior has means and variances over four tokenizer families (experiments/estimator).
- **Outliers**, such as a prompt that the engine truncated, count as one at 2.5 standard deviations, and do
  not make the weights surer.
- **Tenants.** An outlier that leads away from the prior is not learned while most other tenants' prompts have
  the expected length, so the odd prompts of one tenant, such as hidden ones, teach others little. No weight
  leaves what tokenizers have, which bounds the error if one tenant has most of the traffic. Where the first
  prompts were odd, the first plausible one returns all weights to the prior.
- **Drift.** The variances of the weights in use grow slowly, so new traffic is learned at any time.
- **Sampling.** After 200 observations of a text category, one in 8 is learned, because learning one costs
  more than estimating it. Each counts as before, so errors and margins stay the same. An outlier may be
  drift, so the next 16 observations of its category are all learned.

Sources: the token-budget pool routing paper (arXiv 2604.09613) has one exponential average of bytes per token
for each category, and its deviation as the margin. Recursive least squares as in any textbook of adaptive
filters, such as Haykin, Adaptive Filter Theory.
"""

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from serve_app.core.routing.estimation.byte_classes import CLASSES, ByteClass
from serve_app.core.routing.estimation.output_length import OutputEstimate, OutputLengthEstimator, OutputState
from serve_app.core.routing.snapshot import Amount, Number
from serve_app.core.settings_base import NOT_NEGATIVE, settings
from serve_app.request import PromptShape, Request, TextCategory, Usage

# Memory of the mean.
_STEP = 0.05
_COLD_WEIGHT = 1.0
_OUTLIER = 20.0  # a page of documents after many thumbnails
# An image or audio clip before the first observation: LLaVA 576, Qwen-VL up to 16 k.
_ITEM_TOKENS = 1024.0


class MediaTokens(Struct):
    """The learned tokens of one image, sound or file.

    Attributes:
        mean: tokens per item.
        deviation: mean absolute error of the forecast, in tokens per item; 0 before any was observed.
        weight: observations that the mean consists of.
    """

    mean: Amount
    deviation: Amount
    weight: Amount

    @classmethod
    def prior(cls) -> "MediaTokens":
        """Return the tokens before the first observation."""
        return cls(_ITEM_TOKENS, 0.0, _COLD_WEIGHT)

    def __repr__(self) -> str:
        return f"<MediaTokens {self.mean:.0f} +- {self.deviation:.0f}>"

    def observe(self, items: int, tokens: float) -> None:
        """Learn that `items` items had `tokens`, without the rest of their prompt."""
        if items <= 0 or not math.isfinite(tokens):
            return
        observed = min(max(0.0, tokens / items), max(1.0, self.mean) * _OUTLIER)
        step = max(_STEP, 1 / (self.weight + 1))
        self.deviation += step * (abs(observed - self.mean) - self.deviation)
        self.mean += step * (observed - self.mean)
        self.weight = min(self.weight + 1, 1 / _STEP)


# Tokens per byte, or per character of several bytes, and the standard deviation between tokenizers.
_CLASS_PRIORS = {
    ByteClass.LOWER: (0.22, 0.07),
    ByteClass.CAPITAL: (0.90, 0.21),
    ByteClass.DIGIT: (1.11, 0.54),
    ByteClass.BLANK: (0.04, 0.04),
    ByteClass.LINE_END: (1.17, 0.59),
    ByteClass.CODE_SIGN: (0.14, 0.13),
    ByteClass.SIGN: (0.48, 0.25),
    ByteClass.LATIN: (1.62, 0.82),
    ByteClass.LATIN_EXTENDED: (1.69, 0.51),
    ByteClass.GREEK: (0.72, 0.53),
    ByteClass.CYRILLIC: (0.40, 0.21),
    ByteClass.HEBREW: (0.65, 0.52),
    ByteClass.ARABIC: (0.51, 0.36),
    ByteClass.DEVANAGARI: (0.76, 0.65),
    ByteClass.THAI: (0.63, 0.39),
    ByteClass.INDIC: (0.88, 0.78),
    ByteClass.VIETNAMESE: (1.01, 1.09),
    ByteClass.TYPOGRAPHY: (0.73, 0.38),
    ByteClass.KANA: (0.78, 0.34),
    ByteClass.HAN: (0.88, 0.39),
    ByteClass.HANGUL: (0.88, 0.48),
    ByteClass.OTHER: (1.00, 0.60),
}
# JSON schemas of tools, per byte. Templates describe them differently.
_TOOL_PRIOR = (0.28, 0.06)
# Templates with a default system prompt add 20 to 40 tokens to a chat, others about 4.
_CHAT_PRIOR = (16.0, 16.0)
# <|im_start|>, role, line end, <|im_end|>, line end.
_MESSAGE_PRIOR = (5.0, 2.0)
_PRIORS = [_CLASS_PRIORS[name] for name in ByteClass if name < CLASSES] + [
    _TOOL_PRIOR,
    _CHAT_PRIOR,
    _MESSAGE_PRIOR,
]
_PRIOR_MEAN = np.array([mean for mean, _ in _PRIORS])
_PRIOR_VARIANCE = np.array([deviation for _, deviation in _PRIORS]) ** 2
_SIZES = len(_PRIORS)
# Beyond what tokenizers have, with room for long system prompts in templates.
_MOST_WEIGHTS = _PRIOR_MEAN + 4 * np.sqrt(_PRIOR_VARIANCE)
_MOST_WEIGHTS[_SIZES - 2 :] = 4_096.0, 64.0
# Tenants whose prompts are compared.
_MOST_TENANTS = 64
_TOOLS, _CHAT, _MESSAGES = CLASSES, CLASSES + 1, CLASSES + 2
# English prose, for a text of unknown classes.
_PROSE = np.zeros(CLASSES)
_PROSE[[ByteClass.LOWER, ByteClass.CAPITAL, ByteClass.BLANK, ByteClass.LINE_END, ByteClass.SIGN]] = (
    *(0.77, 0.03, 0.16, 0.01),
    0.03,
)
# A prompt without messages: the begin-of-text token, whether or not the tokenizer adds one.
_PLAIN_TOKENS = 1.0

# Relative error of single prompts with known weights, before any was observed.
_COLD_DEVIATION = 0.06
_COLD_COUNT = 4.0
_MIN_DEVIATION = 0.01
# Observations over which the deviation is averaged.
_MEMORY = 60
# Observations of a category from which on a share is learned, and those learned in full after an outlier.
_KNOWN = 200
_RELEARNED = 16
_SHARE = 1 / 8
# The fractions of its multiples select the share, because they are evenly spread and without a period.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_ROUNDING_VARIANCE = 1.0  # tokens^2: text and template may share a token
_OUTLIER_DEVIATIONS = 2.5  # standard deviations
_OUTLIER_RATIO = 2.0  # of the error to the expected tokens
_PLAUSIBLE, _IMPLAUSIBLE = 2.0, 3.0  # standard deviations of the priors
# Growth of a weight's variance per observation, up to the prior one: 0.02 of the standard deviation.
_DRIFT_VARIANCE = 0.02**2 * _PRIOR_VARIANCE
# The lower bound assumes this many times fewer tokens. It decides which requests are rejected as too long, so
# it is wide: an engine rejects wrongly admitted ones by an exact count.
_OPTIMISTIC_FACTOR = 2.5
# Tolerance of a restored covariance; the drift may exceed the prior by less.
_ROUNDING = 1.001

Sizes = npt.NDArray[np.float64]


@settings(block="estimator")
class EstimatorSettings:
    """Margin of the estimated length of a prompt."""

    # Standard deviations of the estimate in an upper estimate. Higher sends fewer requests to a pool that is
    # too short for them, and more to the long pool that would have fitted the short one
    # (experiments/estimator has the figures).
    margin_deviations: Annotated[float, NOT_NEGATIVE] = 1.0


class PromptLengthState(Struct, kw_only=True):
    """Everything that `PromptLength` has learned."""

    weights: Annotated[list[Amount], Meta(min_length=_SIZES, max_length=_SIZES)]
    covariance: Annotated[list[Number], Meta(min_length=_SIZES**2, max_length=_SIZES**2)]
    # All categories.
    deviations: Annotated[dict[TextCategory, tuple[Amount, Amount]], Meta(min_length=len(TextCategory))]
    # States of 0.4.0 have none.
    fits: dict[str, bool] = {}


class PromptLength:
    """The learned length of prompts of one model, without media.

    Attributes:
        weights: tokens per byte or character of each class, per byte of tools, per chat and per message.
    """

    def __init__(self, settings: EstimatorSettings) -> None:
        self._settings = settings
        self.weights: Sizes = _PRIOR_MEAN.copy()
        self._covariance: Sizes = np.diag(_PRIOR_VARIANCE)
        # A view of the covariance.
        self._variances = _diagonal(self._covariance)
        # Whether the last prompt of each tenant had the expected length, the latest last.
        self._fits: dict[str, bool] = {}
        # Relative error, and the number of observations.
        self._deviations = dict.fromkeys(TextCategory, (_COLD_DEVIATION, _COLD_COUNT))

    def __repr__(self) -> str:
        prose = _PROSE.sum() / float(_PROSE @ self.weights[:CLASSES])
        return f"<PromptLength {prose:.2f} bytes of prose per token>"

    def bytes_per_token(self, shape: PromptShape) -> float:
        """Return the mean ratio of this text."""
        tokens = float(self.weights[:CLASSES] @ _sizes(shape)[:CLASSES])
        return shape.text_bytes / max(1.0, tokens)

    def estimate(self, shape: PromptShape) -> tuple[float, float, float]:
        """Return the expected tokens, an upper estimate and a lower bound, of all prompts together.

        The upper estimate is at most one token per byte, as no tokenizer that works on bytes uses more.
        """
        sizes = _sizes(shape)
        expected, deviation = self._forecast(shape, sizes)
        most = shape.text_bytes + shape.tool_bytes + self._template(shape)
        high = min(expected + self._settings.margin_deviations * deviation, max(expected, most))
        plain = 0.0 if shape.messages > 0 else _PLAIN_TOKENS * max(1, shape.prompts)
        return expected + plain, high + plain, expected / _OPTIMISTIC_FACTOR + plain

    def observe(self, shape: PromptShape, tokens: float, tenant: str = "") -> None:
        """Learn that a tenant's prompt had this length. Impossible values are ignored."""
        if tokens <= 0 or not math.isfinite(tokens):
            return
        deviation, count = self._deviations[shape.category]
        if count >= _KNOWN and count * _GOLDEN_RATIO % 1.0 >= _SHARE:
            self._deviations[shape.category] = deviation, count + 1
            return
        sizes = _sizes(shape)
        if shape.messages <= 0:
            tokens = max(1.0, tokens - _PLAIN_TOKENS * max(1, shape.prompts))
        prior = float(_PRIOR_MEAN @ sizes)
        expected = float(self.weights @ sizes)
        spread = math.sqrt(float(_PRIOR_VARIANCE @ (sizes * sizes)))
        if abs(tokens - prior) <= _PLAUSIBLE * spread and abs(expected - prior) > _IMPLAUSIBLE * spread:
            self._forget()
            expected = prior
            deviation, count = self._deviations[shape.category]
        gains = self._covariance @ sizes
        known = max(0.0, float(gains @ sizes))
        text = expected - self._template(shape)
        variance = known + (deviation * text) ** 2 + _ROUNDING_VARIANCE
        innovation = tokens - expected
        limit = min(_OUTLIER_DEVIATIONS * math.sqrt(variance), _OUTLIER_RATIO * max(1.0, expected))
        clipped = min(max(innovation, -limit), limit)
        if self._is_odd(tenant, fits=clipped == innovation) and abs(tokens - prior) > abs(expected - prior):
            self._deviations[shape.category] = deviation, count + 1
            return
        self.weights = np.clip(self.weights + gains * (clipped / variance), 0.0, _MOST_WEIGHTS)
        if clipped == innovation:
            self._covariance -= gains[:, None] * (gains / variance)
        else:
            count = min(count, _KNOWN - _RELEARNED - 1)
        self._variances += _DRIFT_VARIANCE * ((sizes > 0) & (self._variances < _PRIOR_VARIANCE))
        if text > 0:
            # What the uncertainty of the weights and rounding do not explain.
            share = max(0.0, clipped * clipped - known - _ROUNDING_VARIANCE) / (text * text)
            squared = deviation * deviation
            squared += (min(share, 1.0) - squared) / min(count + 1, _MEMORY)
            deviation = max(_MIN_DEVIATION, math.sqrt(squared))
        self._deviations[shape.category] = deviation, count + 1

    def _forget(self) -> None:
        """Return to the prior."""
        self.weights = _PRIOR_MEAN.copy()
        self._covariance = np.diag(_PRIOR_VARIANCE)
        self._variances = _diagonal(self._covariance)
        self._deviations = dict.fromkeys(TextCategory, (_COLD_DEVIATION, _COLD_COUNT))

    def _is_odd(self, tenant: str, *, fits: bool) -> bool:
        """Record whether a tenant's prompt fits; return whether it does not, and most other tenants' do."""
        self._fits.pop(tenant, None)
        others = len(self._fits)
        is_odd = not fits and others > 0 and 2 * sum(self._fits.values()) >= others
        self._fits[tenant] = fits
        if others >= _MOST_TENANTS:
            del self._fits[next(iter(self._fits))]
        return is_odd

    def _forecast(self, shape: PromptShape, sizes: Sizes) -> tuple[float, float]:
        """Return expected tokens without those of a plain prompt's start, and their standard deviation."""
        # For vectors of this length, `dot` takes half the time of `@`.
        expected = float(self.weights.dot(sizes))
        known = max(0.0, float(sizes.dot(self._covariance).dot(sizes)))
        text = expected - self._template(shape)
        return expected, math.sqrt(known + (self._deviations[shape.category][0] * text) ** 2)

    def _template(self, shape: PromptShape) -> float:
        """Return the tokens of the chat template; 0 for a plain prompt."""
        if shape.messages <= 0:
            return 0.0
        return float(self.weights[_CHAT]) + shape.messages * float(self.weights[_MESSAGES])

    def state(self) -> PromptLengthState:
        """Return everything learned (see `snapshot`)."""
        return PromptLengthState(
            weights=self.weights.tolist(),
            covariance=self._covariance.ravel().tolist(),
            deviations=dict(self._deviations),
            fits=dict(self._fits),
        )

    def restore(self, state: PromptLengthState) -> None:
        """Restore a result of `state` (see `snapshot`).

        Raises:
            ValueError: the covariance is impossible; nothing is restored.
        """
        covariance = np.array(state.covariance).reshape(_SIZES, _SIZES)
        variances = covariance.diagonal()
        bound = np.sqrt(np.abs(np.outer(variances, variances))) * _ROUNDING + _ROUNDING - 1
        if (
            variances.min() < 0
            or (variances > _PRIOR_VARIANCE * _ROUNDING).any()
            or (np.abs(covariance) > bound).any()
        ):
            raise ValueError("learned state: 'covariance' is not one of the weights; delete the state")
        self.weights, self._covariance = np.array(state.weights), covariance
        self._variances = _diagonal(covariance)
        self._deviations = {
            name: (max(_MIN_DEVIATION, deviation), count)
            for name, (deviation, count) in state.deviations.items()
        }
        self._fits = dict(state.fits)


def _diagonal(matrix: Sizes) -> Sizes:
    """Return a writable view of the diagonal."""
    diagonal: Sizes = np.einsum("ii->i", matrix)
    return diagonal


def _sizes(shape: PromptShape) -> Sizes:
    classes = shape.byte_classes or _PROSE * shape.text_bytes
    messages = max(0, shape.messages)
    return np.array((*classes, shape.tool_bytes, min(messages, 1), messages), dtype=np.float64)


_BULK = 0.5
# Assumed longest of several prompts in one request, as a multiple of their mean; only their sum is known. An
# engine rejects a request with a longer one as too long, and it is then sent to another pool.
_LONGEST_OF_SEVERAL = 2.0


# Not frozen, because creation of a frozen one takes three times as long.
@dataclass(slots=True, kw_only=True)
class TokenEstimate:
    """The expected needs of a request, in tokens. Immutable by convention.

    Attributes:
        prompt_tokens: upper estimate of its longest prompt, compared with a context limit.
        least_prompt_tokens: lower bound of its longest prompt, used to reject what cannot fit.
        expected_prompt_tokens: mean of all prompts together, which is their use of the KV cache.
        max_output_tokens: maximum output of *one* choice: the client's limit, or a learned quantile.
        expected_output_tokens: mean output of *all* choices together.
        output: the distribution of the output of *one* choice.
        least_output_tokens: the same if lengths have been learned, and less if they are assumed; for
            predictions that must not reject what could be served.
    """

    prompt_tokens: int
    least_prompt_tokens: int
    expected_prompt_tokens: int
    max_output_tokens: int
    expected_output_tokens: int
    least_output_tokens: int
    output: OutputEstimate = field(compare=False)

    @property
    def budget_tokens(self) -> int:
        """L_total: maximum tokens of one sequence. Choices run in parallel and do not add up."""
        return self.prompt_tokens + self.max_output_tokens

    @property
    def expected_tokens(self) -> int:
        """Mean use of the KV cache at the end of the request; choices share their prompt."""
        return self.expected_prompt_tokens + self.expected_output_tokens

    def after(self, generated: int) -> "TokenEstimate":
        """Return the estimate of the rest of an answer whose first tokens became a part of the prompt."""
        if not generated:
            return self
        output = self.output.after(generated)
        return TokenEstimate(
            prompt_tokens=self.prompt_tokens + generated,
            least_prompt_tokens=self.least_prompt_tokens + generated,
            expected_prompt_tokens=self.expected_prompt_tokens + generated,
            max_output_tokens=output.limit,
            expected_output_tokens=math.ceil(output.expected),
            least_output_tokens=math.ceil(output.least),
            output=output,
        )


class EstimatorState(Struct, kw_only=True):
    """Everything that a `TokenEstimator` has learned."""

    version: Literal[2]
    text: PromptLengthState
    media: MediaTokens
    output: OutputState


class TokenEstimator:
    """Estimates the requests of one model, and learns from their actual token counts."""

    def __init__(self, settings: EstimatorSettings) -> None:
        self.settings = settings
        self._text = PromptLength(settings)
        self._media = MediaTokens.prior()
        self._output = OutputLengthEstimator()

    def __repr__(self) -> str:
        return f"<TokenEstimator {self._text!r} {self._media!r}>"

    def bytes_per_token(self, shape: PromptShape) -> float:
        """Return the learned mean ratio of a prompt's text."""
        return self._text.bytes_per_token(shape)

    def estimate(self, request: Request) -> TokenEstimate:
        """Return the token estimate of a request."""
        expected, high, low = self._prompt(request.shape)
        output = self._output.estimate(request)
        choices = max(1, request.spec.choices)
        return TokenEstimate(
            prompt_tokens=high,
            least_prompt_tokens=low,
            expected_prompt_tokens=expected,
            max_output_tokens=output.limit,
            expected_output_tokens=math.ceil(output.expected * choices),
            least_output_tokens=math.ceil(output.least * choices),
            output=output,
        )

    def observe(self, request: Request, usage: Usage) -> None:
        """Learn from the engine's token counts of a completed request."""
        self._output.observe(request, usage)
        shape = request.shape
        if shape.prompt_tokens is None and usage.prompt_tokens > 0:
            self._observe_prompt(shape, usage.prompt_tokens, request.tenant)

    def _prompt(self, shape: PromptShape) -> tuple[int, int, int]:
        """Return the mean tokens of all prompts, then upper estimate and lower bound of the longest one."""
        prompts = max(1, shape.prompts)
        longest = min(prompts, _LONGEST_OF_SEVERAL) / prompts
        if shape.prompt_tokens is not None:
            exact = shape.prompt_tokens
            return exact, math.ceil(exact * longest), math.ceil(exact / prompts)
        expected, high, low = self._text.estimate(shape)
        if shape.media_items:
            media = shape.media_items * self._media.mean
            expected += media
            high += media + shape.media_items * self._media.deviation * self.settings.margin_deviations
        return math.ceil(expected), max(math.ceil(high * longest), 1), max(math.floor(low / prompts), 1)

    def _observe_prompt(self, shape: PromptShape, tokens: int, tenant: str) -> None:
        if not shape.media_items:
            self._text.observe(shape, tokens, tenant)
            return
        text, _, _ = self._text.estimate(shape)
        media = shape.media_items * self._media.mean
        if media >= _BULK * (text + media):
            self._media.observe(shape.media_items, tokens - text)

    def state(self) -> EstimatorState:
        """Return everything learned (see `snapshot`)."""
        return EstimatorState(
            version=2, text=self._text.state(), media=copy(self._media), output=self._output.state()
        )

    def restore(self, state: EstimatorState) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        self._text.restore(state.text)
        self._media = copy(state.media)
        self._output.restore(state.output)
