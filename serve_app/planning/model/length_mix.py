"""The lengths of a workload as arrays, and its two parts at a value of `B_short`.

Requests are routed by their token budget, which is known at arrival. Without `max_tokens`, the scheduler uses
a high quantile of the answers in its place (`routing.estimation.output_length`). Some requests then go to the
long pool although they turn out to be short.
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
        prompts, outputs: tokens, in arrays of equal length.
        allowed_outputs: output tokens in every token budget; None uses the output itself.
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
        """The lengths of a trace; an answer has at least one token.

        Args:
            output_known: requests state the length of their answers; otherwise they state nothing.
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
        """Token budgets, by which requests are routed."""
        return self.totals if self.allowed_outputs is None else self.prompts + self.allowed_outputs

    def split(self, b_short_tokens: int) -> tuple["LengthMix", "LengthMix"]:
        """Requests with a budget of at most `b_short_tokens`, and all others; either may be empty."""
        short = self.budgets <= b_short_tokens
        return self._where(short), self._where(~short)

    def _where(self, chosen: NDArray[np.bool_]) -> "LengthMix":
        return LengthMix(self.prompts[chosen], self.outputs[chosen], self.allowed_outputs)
