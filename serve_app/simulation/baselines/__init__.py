"""Research baselines: ordering policies that only a simulation can play, beside those of production.

`random_order` is the control, `oracle` the upper bound. Every order of production that does not isolate long
prefills is played with isolation as well. That tells apart what an order gains and what isolation gains.
"""

from collections.abc import Mapping

from serve_app.scheduling.policies import POLICIES, MakePolicy, make_policy
from serve_app.scheduling.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.simulation.baselines.oracle import Oracle
from serve_app.simulation.baselines.random_order import RandomOrder


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
