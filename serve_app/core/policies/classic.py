"""Classic policies: first come first served, shortest job first, and highest response ratio next.

First come first served:

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
    """One queue in order of arrival."""


class FcfsIsolated(Fcfs):
    """FCFS with prefill isolation, to measure isolation alone."""

    isolates = True


# Shortest job first by prompt length, with and without ageing.
#
# Order: the shortest prefill; with ageing, a request gains a fixed number of tokens per second of waiting.
# Inputs: prompt length; with ageing also the time of arrival.
# Ties: the order of arrival.
# Starvation: `sjf` starves long requests without bound; ageing bounds it.
# Source: textbook.


# A 4,096-token prompt is level with a fresh short one after about 20 s.
_AGEING_TOKENS_PER_S = 200.0


class Sjf(OrderingPolicy):
    """Shortest prompt first."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return the length of the prompt."""
        return float(scheduled.prefill_tokens)

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the negative length: shorter is more urgent."""
        return -self.key(head)


class SjfAging(Sjf):
    """Shortest prompt first, with ageing."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return length minus gain by waiting. All requests gain alike, so the key needs no current time."""
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
