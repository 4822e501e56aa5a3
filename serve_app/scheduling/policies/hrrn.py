"""Highest response ratio next: `(waited + prefill) / prefill`.

Order: the longest wait relative to the request's own prefill.
Inputs: prompt length, time of arrival, the learned prefill cost.
Ties: the order of arrival.
Starvation: none, since the ratio grows with the wait.
Source: textbook (Brinch Hansen).
"""

import math

from serve_app.scheduling.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.scheduling.request import ScheduledRequest


class Hrrn(OrderingPolicy):
    """Highest response ratio next.

    The order by ratio changes with time. So requests wait in queues of nearly equal length (2 % apart), each
    in the order of arrival.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._prefill_costs = inputs.prefill_costs

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """By length, in steps of a thirty-second of an octave."""
        return str(int(32 * math.log2(scheduled.prefill_tokens)))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The response ratio."""
        prefill_s = self._prefill_costs.of(head.pools[0]).seconds(head.prefill_tokens)
        return (now - head.request.arrived_at) / prefill_s
