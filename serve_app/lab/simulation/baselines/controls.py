"""Bounds of comparisons: the oracle and the random order.

The oracle serves the least total work first, with the true output length, which a simulation discloses as
`max_output_tokens` and production cannot know. Ties: order of arrival. It starves long requests without
bound.

The random order is the control, because any reordering gains something. Input: the request's id. Ties: order
of arrival. It starves requests at random.
"""

import zlib

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest
from serve_app.lab.simulation.baselines.textbook import Sjf

# A decoded token occupies an engine for about as long as some dozens of prefilled ones.
_PREFILL_TOKENS_PER_OUTPUT_TOKEN = 10.0


class Oracle(Sjf):
    """Least total work first, including the output, which production cannot know. Not deployable."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return prefill and decode in units of prefilled tokens."""
        output_tokens = scheduled.request.spec.max_output_tokens or 0
        return scheduled.prefill_tokens + _PREFILL_TOKENS_PER_OUTPUT_TOKEN * output_tokens


class RandomOrder(OrderingPolicy):
    """Order by a hash of the request's id, which needs no random generator."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return a number that does not depend on the content of the request."""
        return float(zlib.crc32(scheduled.request.request_id.encode()))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the negative key."""
        return -self.key(head)
