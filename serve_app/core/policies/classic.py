"""Classic policies: first come first served, and shortest prompt first with ageing.

First come first served:

Order: time of arrival.
Inputs: time of arrival.
Ties: the order of admission.
Starvation: none, but one long request delays every short one behind it (head-of-line blocking).
Source: the default of engines and gateways; the baseline of all comparisons.
"""

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest


class Fcfs(OrderingPolicy):
    """One queue in order of arrival."""


class FcfsIsolated(Fcfs):
    """FCFS with prefill isolation, to measure isolation alone."""

    isolates = True


# Shortest job first by prompt length, with ageing.
#
# Order: the shortest prefill, where a request gains a fixed number of tokens per second of waiting.
# Inputs: prompt length, time of arrival.
# Ties: the order of arrival.
# Starvation: none, since the gain is unbounded.
# Source: textbook.


# A 4,096-token prompt is level with a fresh short one after about 20 s.
_AGEING_TOKENS_PER_S = 200.0


class SjfAging(OrderingPolicy):
    """Shortest prompt first, with ageing."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return length minus gain by waiting. All requests gain alike, so the key needs no current time."""
        return scheduled.prefill_tokens + _AGEING_TOKENS_PER_S * scheduled.request.arrived_at

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the negative key: shorter and older is more urgent."""
        return -self.key(head)
