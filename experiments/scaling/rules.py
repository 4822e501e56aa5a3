"""Scaling rules: ours, Ray Serve's default policy, and a fixed fleet.

In the simulation, pools are scaled while it runs: replicas are ordered, start, drain and leave.

A replica costs from its order on, and accepts requests `start_s` later. A shrinking pool first cancels
pending orders, then drains the replicas with the least in flight. A draining replica completes its requests,
so none is cut.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from serve_app.core import Scheduler
from serve_app.core import events as ev
from serve_app.core.scaling import AutoscalingSettings, FleetScaler, ScaledPool, ScalingSettings, observe
from serve_app.lab.simulation.simulation import (
    Phase,
    ReplicaPlan,
    SimulatedReplica,
    SimulatedRequest,
    Simulation,
)

ScalingRule = Callable[[Scheduler, float], Mapping[str, int]]
"""Returns replicas by pool at a time; a pool that is left out stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFleet:
    """Additional settings of a scaled run.

    Attributes:
        kinds: one plan for each pool; replicas of the pool are numbered copies.
        first: replicas at the start, by pool, which are ready at once.
        rule: decides every `interval_s`.
        start_s: time from an order to a replica that accepts requests.
    """

    kinds: Mapping[str, ReplicaPlan]
    first: Mapping[str, int]
    rule: ScalingRule
    start_s: float
    interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Replicas of a pool from a certain time on.

    Attributes:
        paid: replicas that were ordered and have not left: starting, ready and draining.
    """

    at: float
    pool: str
    ready: int
    paid: int


@dataclass(slots=True)
class _FleetPool:
    ready: list[str] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    draining: list[str] = field(default_factory=list)
    made: int = 0
    paid_s: float = 0.0
    paid_since: float = 0.0

    @property
    def paid(self) -> int:
        return len(self.ready) + len(self.starting) + len(self.draining)


class ScaledSimulation:
    """One run with a scaled fleet.

    Attributes:
        simulation: the run itself.
        sizes: every change of a pool, in order of time.
    """

    def __init__(self, simulation: Simulation, fleet: ScaledFleet) -> None:
        self.simulation, self._fleet = simulation, fleet
        self._pools = {name: _FleetPool() for name in fleet.kinds}
        self.sizes: list[FleetSize] = []
        for name, count in fleet.first.items():
            for _ in range(count):
                self._come(name, self._order(name))

    def run(self, requests: list[SimulatedRequest]) -> None:
        """Run all requests to their end; the simulation has the records."""
        self.simulation.timeline.schedule(0.0, Phase.WAKE_UP, self._decide)
        self.simulation.run(requests)
        for pool in self._pools.values():
            self._account(pool)

    def replica_seconds(self) -> dict[str, float]:
        """Return the seconds for which replicas were paid, by pool."""
        return {name: pool.paid_s for name, pool in self._pools.items()}

    @property
    def _now(self) -> float:
        return self.simulation.timeline.now

    def _decide(self) -> None:
        wanted = self._fleet.rule(self.simulation.scheduler, self._now)
        for name, count in wanted.items():
            self._scale(name, count)
        if not self.simulation.is_over:
            self.simulation.timeline.schedule(self._now + self._fleet.interval_s, Phase.WAKE_UP, self._decide)

    def _scale(self, name: str, count: int) -> None:
        pool = self._pools[name]
        for _ in range(count - len(pool.ready) - len(pool.starting)):
            replica_id = self._order(name)
            coming = partial(self._come, name, replica_id)
            self.simulation.timeline.schedule(self._now + self._fleet.start_s, Phase.ENGINE, coming)
        for _ in range(len(pool.ready) + len(pool.starting) - count):
            self._shrink(name, pool)

    def _order(self, name: str) -> str:
        pool = self._pools[name]
        self._account(pool)
        pool.made += 1
        replica_id = f"{name}-{pool.made}"
        pool.starting.append(replica_id)
        self._note(name)
        return replica_id

    def _come(self, name: str, replica_id: str) -> None:
        pool = self._pools[name]
        if replica_id not in pool.starting:
            return
        pool.starting.remove(replica_id)
        pool.ready.append(replica_id)
        self.simulation.join(replace(self._fleet.kinds[name], replica_id=replica_id))
        self._note(name)

    def _shrink(self, name: str, pool: _FleetPool) -> None:
        self._account(pool)
        if pool.starting:
            pool.starting.pop()
        else:
            least = min(pool.ready, key=lambda each: self.simulation.scheduler.ledger[each].in_flight)
            pool.ready.remove(least)
            pool.draining.append(least)
            replica = self.simulation.replicas[least]
            replica.draining = True
            self.simulation.feed(ev.ReplicaReported(least, replica.report()))
            self._leave_when_idle(name, least, replica)
        self._note(name)

    def _leave_when_idle(self, name: str, replica_id: str, replica: SimulatedReplica) -> None:
        state = self.simulation.scheduler.ledger.get(replica_id)
        if state is not None and state.in_flight:
            again = partial(self._leave_when_idle, name, replica_id, replica)
            self.simulation.timeline.schedule(self._now + self._fleet.interval_s, Phase.WAKE_UP, again)
            return
        pool = self._pools[name]
        self._account(pool)
        pool.draining.remove(replica_id)
        del self.simulation.replicas[replica_id]
        self.simulation.feed(ev.ReplicaLost(replica_id))
        self._note(name)

    def _account(self, pool: _FleetPool) -> None:
        pool.paid_s += pool.paid * (self._now - pool.paid_since)
        pool.paid_since = self._now

    def _note(self, name: str) -> None:
        pool = self._pools[name]
        self.sizes.append(FleetSize(self._now, name, len(pool.ready), pool.paid))


def fixed(_scheduler: Scheduler, _now: float) -> Mapping[str, int]:
    """Return no changes."""
    return {}


class ServeDefault:
    """Ray Serve's default policy, with its default delays and a target of half an engine's batch.

    Replicas follow the pool's running and queued requests divided by the target. A decision must hold for
    `up_s` or `down_s` before it is executed.
    """

    def __init__(self, target: float, bounds: AutoscalingSettings, first: Mapping[str, int]) -> None:
        self._target, self._bounds = target, bounds
        self._now = dict(first)
        self._since: dict[str, tuple[int, float]] = {}
        self._up_s, self._down_s = 30.0, 600.0

    def __call__(self, scheduler: Scheduler, now: float) -> Mapping[str, int]:
        """Return the replicas that hold the requests at the target."""
        for pool, current in self._now.items():
            held = sum(state.in_flight for state in scheduler.ledger if state.spec.pool == pool)
            waiting = sum(work.requests for pools, work in scheduler.queue.work.items() if pools[0] == pool)
            wanted = math.ceil((held + waiting) / self._target)
            wanted = min(max(wanted, self._bounds.min_replicas), self._bounds.max_replicas)
            direction = (wanted > current) - (wanted < current)
            since = self._since.get(pool, (0, now))
            if since[0] != direction:
                since = self._since[pool] = (direction, now)
            delay_s = self._up_s if direction > 0 else self._down_s
            if direction and now - since[1] >= delay_s:
                self._now[pool] = wanted
                self._since[pool] = (0, now)
        return self._now


def work_rule(pools: Iterable[str], bounds: AutoscalingSettings) -> ScalingRule:
    """Return the production rule: `FleetScaler` on the scheduler's own state."""
    scaler = FleetScaler(ScalingSettings(pools={pool: ScaledPool(autoscaling=bounds) for pool in pools}))

    def rule(scheduler: Scheduler, now: float) -> Mapping[str, int]:
        views = observe(scheduler, scaler.pools, now)
        return {name: each.replicas for name, each in scaler.decide(views, now).items()}

    return rule
