"""The token estimate of a request: prompt, output and token budget, in O(1) and without a tokenizer.

    prompt = text_bytes / ratio(category) + tool_bytes / ratio(tools) + template overhead + media
    budget = prompt (upper estimate) + maximum output

`bytes_per_token`, `overhead` and `output_length` learn the parts from the token counts that engines report.
One count cannot separate the parts of a prompt, so a part learns from the difference only where it dominates.
Text, tools and media learn if they are at least half of the prompt, and the template in inverse proportion to
the rest.

Source: token-budget pool routing (arXiv 2604.09613). Ours: overhead, tools, lengths learned for requests
without `max_tokens`, and three numbers for the prompt. Routing uses the upper estimate, KV accounting the
mean, and admission the lower bound.
"""

import math
from dataclasses import dataclass, field

from serve_app.core.routing.estimation.bytes_per_token import BytesPerToken, EstimatorSettings
from serve_app.core.routing.estimation.output_length import OutputEstimate, OutputLengthEstimator
from serve_app.core.routing.estimation.overhead import MediaTokens, TemplateOverhead
from serve_app.core.routing.snapshot import Snapshot, check_version, section
from serve_app.request import PromptShape, Request, TextCategory, Usage

_STATE_VERSION = 1
_OVERHEAD_MARGIN = 2.0  # standard deviations
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


@dataclass(frozen=True, slots=True)
class _Parts:
    """The expected parts of a request's prompts, in tokens."""

    text: float
    tools: float
    overhead: float
    media: float

    @property
    def total(self) -> float:
        return self.text + self.tools + self.overhead + self.media


class TokenEstimator:
    """Estimates the requests of one model, and learns from their actual token counts."""

    def __init__(self, settings: EstimatorSettings) -> None:
        self.settings = settings
        cold_start = settings.cold_bytes_per_token
        self._text = {category: BytesPerToken(settings, cold_start[category]) for category in TextCategory}
        self._tools = BytesPerToken(settings, settings.cold_tool_bytes_per_token)
        self._overhead = TemplateOverhead()
        self._media = MediaTokens()
        self._output = OutputLengthEstimator()

    def __repr__(self) -> str:
        ratios = " ".join(f"{category.value}={ratio.mean:.2f}" for category, ratio in self._text.items())
        return f"<TokenEstimator {ratios} tools={self._tools.mean:.2f} {self._overhead!r} {self._media!r}>"

    def bytes_per_token(self, category: TextCategory) -> float:
        """Return the learned mean ratio of a category."""
        return self._text[category].mean

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
            self._observe_prompt(shape, usage.prompt_tokens)

    def _prompt(self, shape: PromptShape) -> tuple[int, int, int]:
        """Return the mean tokens of all prompts, then upper estimate and lower bound of the longest one."""
        prompts = max(1, shape.prompts)
        longest = min(prompts, _LONGEST_OF_SEVERAL) / prompts
        if shape.prompt_tokens is not None:
            exact = shape.prompt_tokens
            return exact, math.ceil(exact * longest), math.ceil(exact / prompts)
        text, tools = self._text[shape.category], self._tools
        margin = _OVERHEAD_MARGIN * self._overhead.deviation(shape.messages)
        overhead = self._overhead.tokens(shape.messages) * prompts
        media = shape.media_items * self._media.mean
        expected = shape.text_bytes / text.unbiased + shape.tool_bytes / tools.unbiased + overhead + media
        high = shape.text_bytes / text.conservative + shape.tool_bytes / tools.conservative
        high += overhead + margin + media + shape.media_items * self.settings.gamma * self._media.deviation
        low = shape.text_bytes / text.optimistic + shape.tool_bytes / tools.optimistic
        low += max(0.0, overhead - margin)
        return math.ceil(expected), max(math.ceil(high * longest), 1), max(math.floor(low / prompts), 1)

    def _parts(self, shape: PromptShape) -> _Parts:
        return _Parts(
            text=shape.text_bytes / self._text[shape.category].mean,
            tools=shape.tool_bytes / self._tools.mean,
            overhead=self._overhead.tokens(shape.messages) * max(1, shape.prompts),
            media=shape.media_items * self._media.mean,
        )

    def _observe_prompt(self, shape: PromptShape, tokens: int) -> None:
        parts = self._parts(shape)
        if shape.media_items:
            if parts.media >= _BULK * parts.total:
                self._media.observe(shape.media_items, tokens - parts.total + parts.media)
            return
        text, tools = self._text[shape.category], self._tools
        if shape.prompts == 1:
            noise = text.standard_error(shape.text_bytes) + tools.standard_error(shape.tool_bytes)
            beyond = tokens - parts.text - parts.tools
            self._overhead.observe(shape.messages, beyond, noise)
        if parts.text >= _BULK * parts.total:
            text.observe(shape.text_bytes, tokens - parts.total + parts.text)
        elif parts.tools >= _BULK * parts.total:
            tools.observe(shape.tool_bytes, tokens - parts.total + parts.tools)

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {
            "version": _STATE_VERSION,
            "text": {category.value: ratio.state() for category, ratio in self._text.items()},
            "tools": self._tools.state(),
            "overhead": self._overhead.state(),
            "media": self._media.state(),
            "output": self._output.state(),
        }

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        check_version(state, _STATE_VERSION)
        fresh = TokenEstimator(self.settings)
        by_category = section(state, "text")
        for category in TextCategory:
            fresh._text[category].restore(section(by_category, category.value))
        fresh._tools.restore(section(state, "tools"))
        fresh._overhead.restore(section(state, "overhead"))
        fresh._media.restore(section(state, "media"))
        fresh._output.restore(section(state, "output"))
        self._text, self._tools = fresh._text, fresh._tools
        self._overhead, self._media, self._output = fresh._overhead, fresh._media, fresh._output
