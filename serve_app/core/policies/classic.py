"""The classic orders: first come first served, shortest job first, and highest response ratio next.

Order: time of arrival.
Inputs: time of arrival.
Ties: the order of admission.
Starvation: none, but one long request delays every short one behind it (head-of-line blocking).
Source: the default of engines and gateways; the baseline of all comparisons.
"""

import math

from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.core.request import ScheduledRequest


class Fcfs(OrderingPolicy):
    """One queue, in the order of arrival."""


class FcfsIsolated(Fcfs):
    """FCFS with prefill isolation, to measure isolation alone."""

    isolates = True


# Shortest job first by prompt length, with and without ageing.
#
# Order: the shortest prefill; with ageing, a request gains a fixed number of tokens for each second of its
# wait. Inputs: prompt length; with ageing also the time of arrival.
# Ties: the order of arrival.
# Starvation: `sjf` starves long requests without bound; ageing bounds it.
# Source: textbook.


# A 4,096-token prompt is level with a fresh short one after about 20 s.
_AGEING_TOKENS_PER_S = 200.0


class Sjf(OrderingPolicy):
    """The shortest prompt first."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """The prompt's length."""
        return float(scheduled.prefill_tokens)

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The shorter the more urgent."""
        return -self.key(head)


class SjfAging(Sjf):
    """The shortest prompt first, less what it has waited."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Length minus gain by waiting; all requests gain alike, so the order by this key never changes."""
        return scheduled.prefill_tokens + _AGEING_TOKENS_PER_S * scheduled.request.arrived_at


# Highest response ratio next: `(waited + prefill) / prefill`.
#
# Order: the longest wait relative to the request's own prefill.
# Inputs: prompt length, time of arrival, the learned prefill cost.
# Ties: the order of arrival.
# Starvation: none, since the ratio grows with the wait.
# Source: textbook (Brinch Hansen).


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
