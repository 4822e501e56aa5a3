"""Who decides: the production scheduler, and baselines that only choose a replica and count.

The baselines show what the clock, the event loop of the measurement and the size of the working set cost by
themselves.
"""

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from experiments.dispatch.traffic import POOLS, FleetTraffic, budget_tokens
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Command, Dispatch
from serve_app.scheduling.policies.partition import Partition
from serve_app.scheduling.scheduler import Scheduler
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.tuning import RefineAndPruneSettings, refine_and_prune

_LEARNED_FROM = 10_000


class Decider(Protocol):
    """Takes events, returns commands.

    Attributes:
        choosing_ns: nanoseconds of the last event that went into choosing, where that is known apart.
    """

    choosing_ns: int

    def handle(self, event: ev.Event, now: float) -> Sequence[Command]:
        """What is to be done."""


class Production:
    """The scheduler as it runs, with its dispatching on a stopwatch.

    The stopwatch counts a call only where requests wait: without any it returns at once.
    """

    def __init__(self, policy: str, fleet: FleetTraffic, partition: Partition, *, affinity: bool) -> None:
        routing = RoutingSettings(pools=POOLS, b_short_tokens=fleet.b_short_tokens)
        settings = scheduler_settings(policy, routing, {"affinity.enabled": affinity})
        self.scheduler = Scheduler(settings)
        self.choosing_ns = 0
        dispatch, queue = getattr(self.scheduler, "_dispatch"), self.scheduler.queue  # noqa: B009 - as below

        def timed(now: float) -> None:
            if not queue:
                dispatch(now)
                return
            began = time.perf_counter_ns()
            dispatch(now)
            self.choosing_ns += time.perf_counter_ns() - began

        # The scheduler looks the method up at each call, so this is its dispatching as it is.
        setattr(self.scheduler, "_dispatch", timed)  # noqa: B010 - a type checker refuses the plain way
        self.scheduler.handle(ev.PartitionChanged(partition), 0.0)

    def handle(self, event: ev.Event, now: float) -> Sequence[Command]:
        """As the scheduler does."""
        self.choosing_ns = 0
        return self.scheduler.handle(event, now)


@dataclass(slots=True)
class _Counter:
    """What a baseline knows of a replica."""

    replica_id: str
    order: int
    in_flight: int = 0


Choice = Callable[[list[_Counter]], _Counter]


class Baseline:
    """Chooses a replica of the request's home at once; no queue, no estimate, no limits.

    Args:
        choice: makes a choice for each pool, which may remember what it chose.
    """

    def __init__(self, choice: Callable[[], Choice], fleet: FleetTraffic) -> None:
        self.choosing_ns = 0
        self._home = fleet.home
        self._pools: dict[str, list[_Counter]] = {pool: [] for pool in POOLS}
        for spec in fleet.specs():
            members = self._pools[spec.pool]
            members.append(_Counter(spec.replica_id, len(members)))
        self._choices = {pool: choice() for pool in POOLS}
        self._running: dict[str, _Counter] = {}

    def handle(self, event: ev.Event, now: float) -> Sequence[Command]:
        """Choose when a request comes, count down when one is over."""
        self.choosing_ns = 0
        if isinstance(event, ev.Arrived):
            request = event.request
            pool = self._home(request)
            began = time.perf_counter_ns()
            replica = self._choices[pool](self._pools[pool])
            self.choosing_ns = time.perf_counter_ns() - began
            replica.in_flight += 1
            self._running[request.request_id] = replica
            return [
                Dispatch(
                    request_id=request.request_id,
                    gateway_id=request.gateway_id,
                    replica_id=replica.replica_id,
                    pool=pool,
                    length_queue="",
                    estimated_tokens=budget_tokens(request),
                    queue_wait_s=now - request.arrived_at,
                )
            ]
        if isinstance(event, ev.Finished):
            self._running.pop(event.request_id).in_flight -= 1
        return []


def round_robin() -> Choice:
    """One after the other."""
    turns = itertools.count()
    return lambda members: members[next(turns) % len(members)]


def power_of_two() -> Choice:
    """The less busy of two."""
    rng = random.Random(1)  # noqa: S311 - a measurement, no secret

    def choose(members: list[_Counter]) -> _Counter:
        count = len(members)
        one, other = members[int(rng.random() * count)], members[int(rng.random() * count)]
        return one if one.in_flight <= other.in_flight else other

    return choose


def least_loaded() -> Choice:
    """The least busy of all, which looks at every one."""
    return lambda members: min(members, key=lambda member: (member.in_flight, member.order))


Make = Callable[[FleetTraffic], Decider]


def _production(policy: str, fleet: FleetTraffic, *, affinity: bool) -> Decider:
    """The scheduler, with queues learned from the fleet's own traffic."""
    lengths = np.array([job.request.shape.prompt_tokens for job in fleet.jobs[:_LEARNED_FROM]])
    partition = refine_and_prune(lengths, RefineAndPruneSettings())
    return Production(policy, fleet, partition, affinity=affinity)


DECIDERS: Mapping[str, Make] = {
    "ewsjf, affinity": partial(_production, "ewsjf", affinity=True),
    "ewsjf, by load": partial(_production, "ewsjf", affinity=False),
    "fcfs, affinity": partial(_production, "fcfs", affinity=True),
    "fcfs, by load": partial(_production, "fcfs", affinity=False),
    "round robin": partial(Baseline, round_robin),
    "power of two": partial(Baseline, power_of_two),
    "scan": partial(Baseline, least_loaded),
}
