"""Load balancers without a gateway that several experiments play."""

import random
from collections.abc import Sequence

from serve_app.lab.simulation.direct import DirectSimulation
from serve_app.lab.simulation.simulation import OnEnd, ReplicaPlan, SimulatedReplica, SimulatedRequest
from serve_app.lab.workloads.generators import plain_stream


class RoundRobin(DirectSimulation):
    """Every engine in turn."""

    def choose(self, able: Sequence[SimulatedReplica], _simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the engine whose turn it is."""
        return self.in_turn(able)[0]


class PowerOfTwo(DirectSimulation):
    """The less busy of two random engines, as load balancers without shared state do."""

    def __init__(
        self, plans: Sequence[ReplicaPlan], on_end: OnEnd = lambda _simulated, _record: None
    ) -> None:
        super().__init__(plans, on_end)
        self._chance: random.Random = plain_stream(0, "power of two")

    def choose(self, able: Sequence[SimulatedReplica], _simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the less busy of two."""
        drawn = self._chance.sample(able, min(2, len(able)))
        return min(drawn, key=lambda replica: self.outstanding[replica.spec.replica_id])
