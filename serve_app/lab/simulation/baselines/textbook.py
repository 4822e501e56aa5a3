"""Textbook policies: shortest job first, and highest response ratio next.

Shortest job first by prompt length:

Order: the shortest prefill.
Inputs: prompt length.
Ties: the order of arrival.
Starvation: long requests, without bound.
Source: textbook.
"""

import math

from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.core.request import ScheduledRequest


class Sjf(OrderingPolicy):
    """Shortest prompt first."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return the length of the prompt."""
        return float(scheduled.prefill_tokens)

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the negative length: shorter is more urgent."""
        return -self.key(head)


# Highest response ratio next: `(waited + prefill) / prefill`.
#
# Order: the longest wait relative to the request's own prefill.
# Inputs: prompt length, time of arrival, the learned prefill cost.
# Ties: the order of arrival.
# Starvation: none, since the ratio grows with the wait.
# Source: textbook (Brinch Hansen).


class Hrrn(OrderingPolicy):
    """Highest response ratio next.

    The order by ratio changes with time. Requests therefore wait in queues of nearly equal length (2 %
    apart), each in order of arrival.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._prefill_costs = inputs.prefill_costs

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return a queue for the length, in steps of 1/32 octave."""
        return str(int(32 * math.log2(scheduled.prefill_tokens)))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the response ratio less 1, which has the same order."""
        prefill_s = self._prefill_costs.of(head.pools[0]).seconds(head.prefill_tokens)
        return (now - head.request.arrived_at) / prefill_s
