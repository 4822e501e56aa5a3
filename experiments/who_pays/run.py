"""Who used the engines, and for how long?

Tenants of different use share simulated engines. The engine model divides each step among its sequences,
which no scheduler sees. Against that stand three ways to divide the same time by what a scheduler does see.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.lengths import Lengths, drawn_trace
from experiments.common.rows import Key
from experiments.common.seeded import measured_points
from experiments.who_pays.meter import MeteredEngineModel
from serve_app.metrics.record import RequestRecord
from serve_app.routing.prefill_cost import PrefillCosts, PrefillCostSettings
from serve_app.scheduling.costs.engine_time import EngineTime
from serve_app.settings_base import settings
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import SimulatedRequest, Simulation
from serve_app.simulation.workload import Disclosure, requests_of

OURS = "ours"
NO_PREFILL = "equal parts"
TOKENS = "tokens"
_NOTHING_S = 1e-12
RULES = (OURS, NO_PREFILL, TOKENS)


@settings
class EngineLoad:
    """An engine and its traffic.

    Attributes:
        streamed: whether answers are streamed.
        limited: long prefills are computed in chunks that delay nobody; else in whole steps, vLLM's default.
    """

    name: str
    profile: str
    requests_per_s: float
    requests: int
    streamed: bool = True
    limited: bool = True


@settings
class WhoPays:
    """What is played."""

    seeds: int
    replicas: int
    tenants: Mapping[str, Lengths]
    cases: tuple[EngineLoad, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One case with one seed."""

    experiment: WhoPays
    case: EngineLoad
    seed: int


def play(experiment: WhoPays, context: Context) -> Iterator[Measurement]:
    """Every case."""
    seeds = range(experiment.seeds)
    points: list[tuple[Key, list[Run]]] = [
        ({"case": case.name}, [Run(experiment, case, seed) for seed in seeds]) for case in experiment.cases
    ]
    yield from measured_points("who_pays", points, _figures, context, traffic="four kinds of use")


def _figures(run: Run) -> dict[str, Any]:
    simulation, records, metered = _played(run)
    # The same run again: what engine time is charged changes no decision.
    unaware, _, _ = _played(run, PrefillCosts(PrefillCostSettings(prior_per_token_s=_NOTHING_S)))
    tenant_of = {record.request_id: record.tenant for record in records}
    true = defaultdict[str, float](float)
    for model in metered:
        for request_id, seconds in model.used_s.items():
            true[tenant_of[request_id]] += seconds
    found = {
        OURS: _by_tenant(simulation.scheduler.in_flight.engine_time),
        NO_PREFILL: _by_tenant(unaware.scheduler.in_flight.engine_time),
        TOKENS: _tokens(records),
    }
    of_all = sum(true.values())
    figures: dict[str, Any] = {f"true {tenant}": seconds / of_all for tenant, seconds in true.items()}
    figures["engine_seconds"] = of_all
    figures["charged_ratio"] = sum(found[OURS].values()) / of_all
    for rule, used in found.items():
        total = sum(used.values())
        shares = {tenant: used[tenant] / total for tenant in true}
        figures |= {f"{rule} {tenant}": share for tenant, share in shares.items()}
        figures[f"{rule}, moved"] = sum(abs(shares[each] - true[each] / of_all) for each in true) / 2
    return figures


def _played(
    run: Run, costs: PrefillCosts | None = None
) -> tuple[Simulation, list[RequestRecord], list[MeteredEngineModel]]:
    """A run; with `costs`, its engine time goes by these."""
    fleet = FleetSettings(profile=run.case.profile, replicas={ONE_POOL: run.experiment.replicas})
    simulation = Simulation(
        scheduler_settings("ewsjf", fleet.routing, {}), fleet.plans(isolated=run.case.limited)
    )
    if costs is not None:
        simulation.scheduler.in_flight.engine_time = EngineTime(costs)
    metered = []
    for replica in simulation.replicas.values():
        replica.model = MeteredEngineModel(replica.model)
        metered.append(replica.model)
    return simulation, simulation.run(_requests(run, fleet)), metered


def _by_tenant(time: EngineTime) -> dict[str, float]:
    used = defaultdict[str, float](float)
    for _, _, tenant, seconds in time.used:
        used[tenant] += seconds
    return used


def _tokens(records: Sequence[RequestRecord]) -> dict[str, float]:
    used = defaultdict[str, float](float)
    for record in records:
        used[record.tenant] += record.prompt_tokens + record.output_tokens
    return used


def _requests(run: Run, fleet: FleetSettings) -> list[SimulatedRequest]:
    experiment, case = run.experiment, run.case
    trace = drawn_trace(experiment.tenants, case.requests_per_s, case.requests, run.seed)
    return list(requests_of(trace, Disclosure(streamed=case.streamed), fleet.plans()[0].engine.block_size))


EXPERIMENT = Experiment(settings=WhoPays, play=play)
