"""The lengths of a workload as arrays: what sizing needs of a trace, and its two parts at a border."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from serve_app.workloads.trace import Trace

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class LengthMix:
    """Prompt and output lengths, request by request.

    Attributes:
        prompts, outputs: tokens; as many of the one as of the other.
    """

    prompts: Counts
    outputs: Counts

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.outputs):
            raise ValueError(
                f"each prompt needs its output, got {len(self.prompts)} and {len(self.outputs)} lengths"
            )

    @classmethod
    def of(cls, trace: Trace) -> "LengthMix":
        """The lengths of a trace; an answer counts at least its first token."""
        prompts = np.array([one.prompt_tokens for one in trace.requests], dtype=np.int64)
        outputs = np.array([max(1, one.output_tokens) for one in trace.requests], dtype=np.int64)
        return cls(prompts, outputs)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def totals(self) -> Counts:
        """Prompt and output together: the token budget."""
        return self.prompts + self.outputs

    def split(self, b_short_tokens: int) -> tuple["LengthMix", "LengthMix"]:
        """Requests with a total of at most `b_short_tokens`, and all others; either may be empty."""
        short = self.totals <= b_short_tokens
        return self._where(short), self._where(~short)

    def share_up_to(self, tokens: int) -> float:
        """Share of requests with a total of at most so many tokens: alpha."""
        return float(np.mean(self.totals <= tokens))

    def _where(self, chosen: NDArray[np.bool_]) -> "LengthMix":
        return LengthMix(self.prompts[chosen], self.outputs[chosen])
