"""Baselines: ordering policies for comparisons in simulations, in addition to those of production.

`textbook`, `two_queue` and `wspt_drr` are the orders of others, and `ewsjf_paper` and `ewsjf_released` are
EWSJF as published. `controls` has the upper bound and the random control. Every order that does not isolate
long prefills is also played with isolation, which separates the gain of an order from the gain of isolation.
"""

from collections.abc import Mapping

from serve_app.core.policies import POLICIES, MakePolicy
from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.lab.simulation.baselines.controls import Oracle, RandomOrder
from serve_app.lab.simulation.baselines.ewsjf_paper import EwsjfPaper
from serve_app.lab.simulation.baselines.ewsjf_released import EwsjfReleased
from serve_app.lab.simulation.baselines.textbook import Hrrn, Sjf
from serve_app.lab.simulation.baselines.two_queue import TwoQueues
from serve_app.lab.simulation.baselines.wspt_drr import WsptDrr

_ORDERS: Mapping[str, MakePolicy] = {
    **POLICIES,
    "sjf": lambda _: Sjf(),
    "hrrn": Hrrn,
    "wspt-drr": lambda _: WsptDrr(),
    "two-queue": lambda _: TwoQueues(),
    "ewsjf-released": lambda _: EwsjfReleased(),
    "ewsjf-paper": EwsjfPaper,
}


def _isolated(make: MakePolicy) -> MakePolicy:
    """Add prefill isolation to a policy."""

    def made(inputs: PolicyInputs) -> OrderingPolicy:
        policy = make(inputs)
        policy.isolates = True
        return policy

    return made


_ISOLATED: Mapping[str, MakePolicy] = {
    f"{name}-isolated": _isolated(make)
    for name, make in _ORDERS.items()
    if f"{name}-isolated" not in _ORDERS and not make(PolicyInputs()).isolates
}

SIMULATED_POLICIES: Mapping[str, MakePolicy] = {
    **_ORDERS,
    **_ISOLATED,
    "random": lambda _: RandomOrder(),
    "oracle": lambda _: Oracle(),
}
"""All policies that a simulation can play."""
