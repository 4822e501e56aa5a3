"""EWSJF as its authors released it, for comparison.

Order: the head with the highest `wait * (1 + 0.5 ln(L + 1)) * step / (L // step + 1)`. A round takes only
from the best queue, without backfill.
Inputs: prompt length, time of arrival.
Ties: the order of arrival.
Starvation: of long prompts less than with the paper's score, since this one is proportional to the wait.
Source: the scoring of the released code.
"""

import math

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest

_STEP_TOKENS = 200


class EwsjfReleased(OrderingPolicy):
    """Queues of equal width; a round takes from one of them."""

    leaves_out_heads = True

    def __init__(self) -> None:
        self._draining: str | None = None

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """By whole steps of length."""
        low = scheduled.prefill_tokens // _STEP_TOKENS * _STEP_TOKENS
        return f"{low}-{low + _STEP_TOKENS - 1}"

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The released formula."""
        tokens = head.prefill_tokens
        waited_s = now - head.request.arrived_at
        return waited_s * (1 + 0.5 * math.log(tokens + 1)) * _STEP_TOKENS / (tokens // _STEP_TOKENS + 1)

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """The best queue; within a round, only the one that it began with as long as that has heads."""
        super().rank(heads, now)
        if any(head.length_queue == self._draining for head in heads):
            heads[:] = [head for head in heads if head.length_queue == self._draining]

    def on_round_start(self) -> None:
        """Choose anew."""
        self._draining = None

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Continue with the queue that the round began with."""
        if self._draining is None:
            self._draining = scheduled.length_queue
