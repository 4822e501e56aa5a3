"""Research baselines: ordering policies that only a simulation can play, beside those of production.

`random_order` is the control, `oracle` the upper bound.
"""

from collections.abc import Mapping

from serve_app.scheduling.policies import POLICIES, MakePolicy
from serve_app.simulation.baselines.oracle import Oracle
from serve_app.simulation.baselines.random_order import RandomOrder

SIMULATED_POLICIES: Mapping[str, MakePolicy] = {
    **POLICIES,
    "random": lambda _: RandomOrder(),
    "oracle": lambda _: Oracle(),
}
"""Every policy that a simulation can play."""
