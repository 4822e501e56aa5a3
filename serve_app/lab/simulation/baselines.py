"""Research baselines: ordering policies for simulations only, in addition to those of production.

`random_order` is the control, `oracle` the upper bound. Every production order that does not isolate long
prefills is also played with isolation, which separates the gain of an order from the gain of isolation.

The oracle serves the least total work first, with the true output length, which a simulation discloses as
`max_output_tokens` and production cannot know. Ties: order of arrival. It starves long requests without
bound.

The random order is the control, because any reordering gains something. Input: the request's id. Ties: order
of arrival. It starves requests at random.
"""

import zlib
from collections.abc import Mapping

from serve_app.core.policies import POLICIES, MakePolicy, make_policy
from serve_app.core.policies.classic import Sjf
from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.core.request import ScheduledRequest

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


def _isolated(make: MakePolicy) -> MakePolicy:
    """Add prefill isolation to a policy."""

    def made(inputs: PolicyInputs) -> OrderingPolicy:
        policy = make(inputs)
        policy.isolates = True
        return policy

    return made


_ISOLATED: Mapping[str, MakePolicy] = {
    f"{name}-isolated": _isolated(make)
    for name, make in POLICIES.items()
    if f"{name}-isolated" not in POLICIES and not make_policy(name).isolates
}

SIMULATED_POLICIES: Mapping[str, MakePolicy] = {
    **POLICIES,
    **_ISOLATED,
    "random": lambda _: RandomOrder(),
    "oracle": lambda _: Oracle(),
}
"""All policies that a simulation can play."""
