"""A random order, as control: part of what any reordering gains, it gains as well.

Question: none. Inputs: the request's id. Ties: the order of arrival. Starves by bad luck.
"""

import zlib

from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import ScheduledRequest


class RandomOrder(OrderingPolicy):
    """By a hash of the request's id: no chance of its own, and no meaning either. Starves by bad luck."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """A number that has nothing to do with the request."""
        return float(zlib.crc32(scheduled.request.request_id.encode()))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The same number."""
        return -self.key(head)
