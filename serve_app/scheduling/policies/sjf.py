"""Shortest job first by prompt length, with and without ageing.

Order: the shortest prefill; with ageing, a request gains a fixed number of tokens for each second of its
wait. Inputs: prompt length; with ageing also the time of arrival.
Ties: the order of arrival.
Starvation: `sjf` starves long requests without bound; ageing bounds it.
Source: textbook.
"""

from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import ScheduledRequest

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
