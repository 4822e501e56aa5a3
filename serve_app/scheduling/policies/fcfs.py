"""First come, first served, alone and with prefill isolation.

Order: time of arrival.
Inputs: time of arrival.
Ties: the order of admission.
Starvation: none, but one long request delays every short one behind it (head-of-line blocking).
Source: the default of engines and gateways; the baseline of all comparisons.
"""

from serve_app.scheduling.policies.protocol import OrderingPolicy


class Fcfs(OrderingPolicy):
    """One queue, in the order of arrival."""


class FcfsIsolated(Fcfs):
    """FCFS with prefill isolation, to measure isolation alone."""

    isolates = True
