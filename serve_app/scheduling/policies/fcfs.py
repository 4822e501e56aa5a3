"""First come, first served, alone and with prefill isolation; and a random order as control.

Question: who came first? Inputs: the time of arrival. Ties: the order in which requests were let in. Starves
nobody, and lets one long request hold up every short one behind it. Source: the default of every engine and
gateway; the baseline of all claims. The random order is the other one: part of what any reordering gains, it
gains as well.
"""

import zlib

from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import Entry


class Fcfs(OrderingPolicy):
    """One queue, in the order of arrival."""


class FcfsIsolated(Fcfs):
    """FCFS among the short and among the long, with long prefills kept apart: isolation alone."""

    isolates = True


class Random(OrderingPolicy):
    """By a hash of the request's id: no chance of its own, and no meaning either. Starves by bad luck."""

    def key(self, entry: Entry) -> float:
        """A number that has nothing to do with the request."""
        return float(zlib.crc32(entry.request.request_id.encode()))

    def score(self, head: Entry, now: float) -> float:
        """The same number."""
        return -self.key(head)
