"""A random order, the control: any reordering gains something, and this one shows how much.

Question: none. Inputs: the request's id. Ties: the order of arrival. Starves requests by chance.
"""

import zlib

from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import ScheduledRequest


class RandomOrder(OrderingPolicy):
    """Orders by a hash of the request's id, which needs no random generator."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """A number that does not depend on the content of the request."""
        return float(zlib.crc32(scheduled.request.request_id.encode()))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The same number."""
        return -self.key(head)
