"""The token estimate of a request: prompt, output and token budget, without a tokenizer.

    prompt = text, tools and chat template (`prompt_length`) + media
    budget = prompt (upper estimate) + maximum output

`prompt_length`, `media_tokens` and `output_length` learn the parts from the token counts that engines report.
One count cannot separate media from the rest, so prompts with media teach nothing about text, and media learn
if they are at least half of the prompt.

Source: token-budget pool routing (arXiv 2604.09613). Ours: chat templates, tools, lengths learned for
requests without `max_tokens`, and three numbers for the prompt. Routing uses the upper estimate, KV
accounting the mean, and admission the lower bound.
"""

import math
from dataclasses import dataclass, field

from serve_app.core.routing.estimation.media_tokens import MediaTokens
from serve_app.core.routing.estimation.output_length import OutputEstimate, OutputLengthEstimator
from serve_app.core.routing.estimation.prompt_length import EstimatorSettings, PromptLength
from serve_app.core.routing.snapshot import Snapshot, check_version, section
from serve_app.request import PromptShape, Request, Usage

_STATE_VERSION = 2
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


class TokenEstimator:
    """Estimates the requests of one model, and learns from their actual token counts."""

    def __init__(self, settings: EstimatorSettings) -> None:
        self.settings = settings
        self._text = PromptLength(settings)
        self._media = MediaTokens()
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

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {
            "version": _STATE_VERSION,
            "text": self._text.state(),
            "media": self._media.state(),
            "output": self._output.state(),
        }

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        check_version(state, _STATE_VERSION)
        fresh = TokenEstimator(self.settings)
        fresh._text.restore(section(state, "text"))
        fresh._media.restore(section(state, "media"))
        fresh._output.restore(section(state, "output"))
        self._text, self._media, self._output = fresh._text, fresh._media, fresh._output
