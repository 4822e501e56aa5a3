"""Highest response ratio next: `(waited + prefill) / prefill`.

Question: who has waited longest for its own prefill time? Inputs: prompt length, time of arrival, the learned
prefill cost. Ties: the order of arrival. Starves nobody, as waiting counts. Source: textbook (Brinch Hansen).
"""

import math

from serve_app.scheduling.policies.inputs import PolicyInputs, prompt_tokens
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import ScheduledRequest


class Hrrn(OrderingPolicy):
    """Highest response ratio next: `(waited + prefill) / prefill`. Starves nobody, as waiting counts.

    The ratio's order changes with time, so requests wait in queues of nearly equal length (2 % apart), in the
    order of arrival.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._prefill_cost = inputs.prefill_cost

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """By length, in steps of a thirty-second of an octave."""
        return str(int(32 * math.log2(prompt_tokens(scheduled))))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The response ratio."""
        return (now - head.request.arrived_at) / self._prefill_cost.seconds(prompt_tokens(head))
