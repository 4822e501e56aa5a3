"""Research baselines: ordering policies that only a simulation can play, beside those of production.

`random_order` is the control, `oracle` the upper bound. Every order of production that does not isolate long
prefills is played with isolation as well. That tells apart what an order gains and what isolation gains.

The oracle: the least total work first, with output lengths that nobody can know in production.

Question: whose service is shortest, output included? Inputs: prompt length and the true output length, which
a simulation discloses as `max_output_tokens`. Ties: the order of arrival. Starves long requests without
bound.

A random order, the control: any reordering gains something, and this one shows how much.

Question: none. Inputs: the request's id. Ties: the order of arrival. Starves requests by chance.
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
    """The least total work first, output included. Not deployable: in production nobody knows it."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Prefill and decode in units of prefilled tokens."""
        output_tokens = scheduled.request.spec.max_output_tokens or 0
        return scheduled.prefill_tokens + _PREFILL_TOKENS_PER_OUTPUT_TOKEN * output_tokens


class RandomOrder(OrderingPolicy):
    """Orders by a hash of the request's id, which needs no random generator."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """A number that does not depend on the content of the request."""
        return float(zlib.crc32(scheduled.request.request_id.encode()))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """The same number."""
        return -self.key(head)


def _isolated(make: MakePolicy) -> MakePolicy:
    """The same order, with prefill isolation."""

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
"""Every policy that a simulation can play."""
