"""Shortest job first by prompt length, with and without ageing.

Question: whose prefill is shortest? Inputs: prompt length; with ageing also the time of arrival. Ties: the order
of arrival. `sjf` starves long requests without bound; ageing bounds it: a request gains `rate` tokens for each
second that it waits. Source: textbook; the usual remedy.
"""

from serve_app.scheduling.policies.inputs import prompt_tokens
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import ScheduledRequest

# A 4,096-token prompt draws level with a fresh short one after about 20 s.
_AGEING_TOKENS_PER_S = 200.0


class Sjf(OrderingPolicy):
    """The shortest prompt first."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """The prompt's length."""
        return float(prompt_tokens(scheduled))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The shorter the more urgent."""
        return -self.key(head)


class SjfAging(Sjf):
    """The shortest prompt first, less what it has waited."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Length minus gain by waiting; all gain alike, so the order by this key never changes."""
        return prompt_tokens(scheduled) + _AGEING_TOKENS_PER_S * scheduled.request.arrived_at
