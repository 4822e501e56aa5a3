"""First come, first served, alone and with prefill isolation.

Question: who came first? Inputs: the time of arrival. Ties: the order in which requests were admitted. Starves
nobody, and lets one long request hold up every short one behind it. Source: the default of every engine and
gateway; the baseline of all claims.
"""

from serve_app.scheduling.policies.protocol import OrderingPolicy


class Fcfs(OrderingPolicy):
    """One queue, in the order of arrival."""


class FcfsIsolated(Fcfs):
    """FCFS among the short and among the long, with long prefills kept apart: isolation alone."""

    isolates = True
