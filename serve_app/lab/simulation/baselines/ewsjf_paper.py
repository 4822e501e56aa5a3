"""EWSJF as published, without isolation, delay bound and promotion.

Order: the head with the highest score. A round fills from the queue of its first dispatch, then from its
neighbours.
Inputs: as `ewsjf`.
Ties: the order of arrival.
Starvation: long prompts, as `ewsjf` without promotion.
Source: EWSJF (arXiv 2601.21758), section 4.3, Algorithm 1.
"""

from serve_app.core.policies.ewsjf import Ewsjf
from serve_app.core.policies.protocol import PolicyInputs
from serve_app.core.request import ScheduledRequest


class EwsjfPaper(Ewsjf):
    """The paper's policy: Algorithm 1 fills from the best queue, then from its neighbours, nearest first."""

    isolates = False
    promotes = False
    bounds_delay = False

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self._filling_from: int | None = None

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort by score. Once a round fills from a queue, that queue is first, then its neighbours."""
        super().rank(heads, now)
        index = self._filling_from
        if index is not None:
            heads.sort(key=lambda head: abs(self.queues.index(head.length_queue) - index))

    def on_round_start(self) -> None:
        """Reset the queue of the previous round."""
        self._filling_from = None

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Select the queue of the first dispatch for the rest of the round."""
        if self._filling_from is None:
            self._filling_from = self.queues.index(scheduled.length_queue)
