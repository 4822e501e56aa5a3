"""The lengths of a workload as arrays: what sizing needs of a trace, and its two parts at a border.

Requests are routed by their token budget, known when they come. Where clients state no `max_tokens`, the
scheduler puts a high quantile of the answers in its place (`routing.output_length`), so a border sends fewer
requests to the short pool than have so few tokens in the end.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from serve_app.routing.estimation.length_curve import OutputSettings
from serve_app.workloads.trace import Trace

Counts = NDArray[np.int64]

# As in the scheduler's own settings.
_QUANTILE = OutputSettings().quantile


@dataclass(frozen=True)
class LengthMix:
    """Prompt and output lengths, request by request.

    Attributes:
        prompts, outputs: tokens; as many of the one as of the other.
        allowed_outputs: what stands for the answer in the token budget; None is the answer itself.
    """

    prompts: Counts
    outputs: Counts
    allowed_outputs: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.outputs):
            raise ValueError(
                f"each prompt needs its output, got {len(self.prompts)} and {len(self.outputs)} lengths"
            )

    @classmethod
    def of(cls, trace: Trace, *, output_known: bool = True) -> "LengthMix":
        """The lengths of a trace; an answer counts at least its first token.

        Args:
            output_known: requests state how long their answers will be; otherwise they state nothing.
        """
        prompts = np.array([one.prompt_tokens for one in trace.requests], dtype=np.int64)
        outputs = np.array([max(1, one.output_tokens) for one in trace.requests], dtype=np.int64)
        allowed = None if output_known else math.ceil(np.quantile(outputs, _QUANTILE))
        return cls(prompts, outputs, allowed)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def totals(self) -> Counts:
        """Prompt and output together."""
        return self.prompts + self.outputs

    @cached_property
    def budgets(self) -> Counts:
        """What requests are routed by: the prompt, and what stands for its answer."""
        return self.totals if self.allowed_outputs is None else self.prompts + self.allowed_outputs

    def split(self, b_short_tokens: int) -> tuple["LengthMix", "LengthMix"]:
        """Requests with a budget of at most `b_short_tokens`, and all others; either may be empty."""
        short = self.budgets <= b_short_tokens
        return self._where(short), self._where(~short)

    def share_up_to(self, tokens: int) -> float:
        """Share of requests with a budget of at most so many tokens: alpha."""
        return float(np.mean(self.budgets <= tokens))

    def _where(self, chosen: NDArray[np.bool_]) -> "LengthMix":
        return LengthMix(self.prompts[chosen], self.outputs[chosen], self.allowed_outputs)
