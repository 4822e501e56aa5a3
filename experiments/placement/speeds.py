"""Speeds: the cost to learn those of unlike replicas, instead of knowing them.

Every second replica of a pool takes twice as long for each iteration. The scheduler learns the speeds, knows
them from the start, or takes all replicas for alike; the rule of choice is the same. Two load balancers
without a gateway are beside it: the fewest requests, and LMetric times the known slowness, which also knows
all caches at once. All get the same requests at the same times.

Load 1.0 is the rate at which the same replicas finish requests of the workload under FCFS, placed by load
alone.
"""

import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import call

from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.load_balancers import LMetric
from experiments.common.provenance import generated
from experiments.placement.affinity import Figures, after_warm_up, ttft_figures
from experiments.placement.sessions import SESSIONS
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.prefill_cost import ReplicaSpeed
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import (
    ONE_POOL,
    DirectSimulation,
    Disclosure,
    FleetSettings,
    at_rate,
    choose_trace,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedReplica, SimulatedRequest, Simulation
from serve_app.lab.workloads import Trace, TraceChoice


@settings
class Workload:
    """One workload.

    Attributes:
        saturated_per_s: requests per second at load 1.0.
        requests: in each run.
    """

    saturated_per_s: float
    requests: int


@settings
class SpeedsSettings:
    """Settings of the part.

    Attributes:
        slowness: time of the slow replicas, relative to the others.
        workloads: `paper-mix`, or names of `SESSIONS`.
        metrics: whether engines report their load. Load balancers know it without, and are played once.
    """

    profile: str
    replicas: int
    slowness: float
    policy: str
    workloads: Mapping[str, Workload]
    loads: tuple[float, ...]
    metrics: tuple[bool, ...]
    variants: tuple[str, ...]
    seeds: tuple[int, ...]


class _Known(ReplicaSpeed):
    """A speed that is known, and not learned."""

    __slots__ = ("_slowness",)

    def __init__(self, slowness: float) -> None:
        super().__init__()
        self._slowness = slowness

    @property
    def slowness(self) -> float:
        """The known slowness."""
        return self._slowness

    @property
    def answers(self) -> Collection[float]:
        """As many as are known after enough answers."""
        return [self._slowness] * 16


class _Weighted(LMetric):
    """LMetric times the slowness of each engine, by the time that it takes for one prompt token."""

    def choose(self, able: Sequence[SimulatedReplica], simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the engine with the least weighted cost."""

        def weighted(replica: SimulatedReplica) -> float:
            return self.cost(self._state(replica, simulated))[0] * (replica.spec.prefill_token_s or 1.0)

        return min(self.in_turn(able), key=weighted)


_BALANCERS: Mapping[str, Callable[[Sequence[ReplicaPlan]], DirectSimulation]] = {
    "least requests, no gateway": DirectSimulation,
    "LMetric by known speeds, at once": _Weighted,
}
LEARNED, KNOWN, ALIKE = "learned speeds", "known speeds", "no speeds"


def play(settings: SpeedsSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant at every load."""
    known = (LEARNED, KNOWN, ALIKE, *_BALANCERS)
    if unknown := set(settings.variants) - set(known):
        raise SettingsError(f"no variant {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    cells = [
        Cell(
            key={"workload": workload, "metrics": metrics, "load": load, "variant": variant},
            runs=[
                partial(play_run, settings, workload, load, metrics, variant, seed) for seed in settings.seeds
            ],
            seeds=settings.seeds,
            traces=generated(workload),
        )
        for workload, metrics, load, variant in itertools.product(
            settings.workloads, settings.metrics, settings.loads, settings.variants
        )
        if metrics or variant not in _BALANCERS
    ]
    return play_cells("speeds", cells, call, context)


def play_run(
    settings: SpeedsSettings, workload: str, load: float, metrics: bool, variant: str, seed: int
) -> Figures:
    """Play one variant at one load with one seed."""
    fleet = FleetSettings(
        profile=settings.profile, replicas={ONE_POOL: settings.replicas}, reports_load=metrics
    )
    equal = fleet.plans(isolated=variant not in _BALANCERS)
    slowness = {
        plan.replica_id: settings.slowness if number % 2 else 1.0 for number, plan in enumerate(equal)
    }
    plans = [replace(plan, step_time=plan.step_time.scaled(slowness[plan.replica_id])) for plan in equal]
    trace = _trace(settings.workloads[workload], workload, load, seed)
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    if (balancer := _BALANCERS.get(variant)) is not None:
        return _figures(balancer(plans).run(requests), slowness)
    simulation = Simulation(scheduler_settings(settings.policy, fleet.routing, {}), plans)
    if variant != LEARNED:
        ledger = simulation.scheduler.ledger
        for replica in ledger:
            known = variant == KNOWN
            replica.speed = _Known(slowness[replica.spec.replica_id] if known else 1.0)
        ledger.speeds.compare(ONE_POOL, ledger.of_pool(ONE_POOL), 0.0)
    return _figures(simulation.run(requests), slowness)


def _trace(one: Workload, name: str, load: float, seed: int) -> Trace:
    rate_per_s = load * one.saturated_per_s
    if name in SESSIONS:
        return SESSIONS[name].trace(one.requests, rate_per_s, seed)
    return at_rate(choose_trace(TraceChoice(name=name, requests=one.requests), seed), rate_per_s)


def _figures(records: list[RequestRecord], slowness: Mapping[str, float]) -> Figures:
    measured = after_warm_up(records)
    return {
        **ttft_figures(measured),
        "e2e_mean_s": statistics.fmean(record.finished_at - record.arrived_at for record in measured),
        # Share of requests on slow replicas.
        "slow_ratio": statistics.fmean(slowness[record.replica] > 1.0 for record in measured),
    }


EXPERIMENT = Experiment(settings=SpeedsSettings, play=play)
