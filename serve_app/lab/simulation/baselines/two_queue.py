"""Two queues, short and long prompts, served at a fixed ratio.

Order: sixteen short requests for each long one while both are queued.
Inputs: prompt length, and the number of short requests dispatched in a row.
Ties: the short queue.
Starvation: none.
Source: the usual short/long split.
"""

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest

_SHORT_TOKENS = 512
_SHORT_PER_LONG = 16


class TwoQueues(OrderingPolicy):
    """Prompts up to 512 tokens and longer ones; sixteen short for each long one while both are queued."""

    def __init__(self) -> None:
        self._short_in_a_row = 0

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return `short` or `long`."""
        return "short" if scheduled.prefill_tokens <= _SHORT_TOKENS else "long"

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort heads of the queue that is next by the ratio to the front."""
        first = "long" if self._short_in_a_row >= _SHORT_PER_LONG else "short"
        heads.sort(key=lambda head: (head.length_queue != first, head.sequence))

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Count the short requests dispatched in a row."""
        self._short_in_a_row = self._short_in_a_row + 1 if scheduled.length_queue == "short" else 0
