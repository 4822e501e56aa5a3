"""EWSJF as released by its authors, for comparison.

Order: the head with the highest `wait * (1 + 0.5 ln(L + 1)) * step / (L // step + 1)`. A round dispatches
only from the best queue, without backfill.
Inputs: prompt length, time of arrival.
Ties: the order of arrival.
Starvation: long prompts, less than with the paper's score, because this one is proportional to the wait.
Source: the scoring of the released code.
"""

import math

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest

_STEP_TOKENS = 200


class EwsjfReleased(OrderingPolicy):
    """Queues of equal width, one of which is served in each round."""

    omits_heads = True

    def __init__(self) -> None:
        self._draining: str | None = None

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return a queue of `_STEP_TOKENS` lengths."""
        low = scheduled.prefill_tokens // _STEP_TOKENS * _STEP_TOKENS
        return f"{low}-{low + _STEP_TOKENS - 1}"

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the released formula."""
        tokens = head.prefill_tokens
        waited_s = now - head.request.arrived_at
        return waited_s * (1 + 0.5 * math.log(tokens + 1)) * _STEP_TOKENS / (tokens // _STEP_TOKENS + 1)

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort by score. Within a round only the queue of its first dispatch remains, while it has heads."""
        super().rank(heads, now)
        if any(head.length_queue == self._draining for head in heads):
            heads[:] = [head for head in heads if head.length_queue == self._draining]

    def on_round_start(self) -> None:
        """Reset the queue of the previous round."""
        self._draining = None

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Select the queue of the first dispatch for the rest of the round."""
        if self._draining is None:
            self._draining = scheduled.length_queue
