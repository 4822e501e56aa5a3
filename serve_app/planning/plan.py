"""One plan, from the workload to the result: the size of a run, the stand-in, the search."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from serve_app.engine_model.profiles import load_profile
from serve_app.planning.model.length_mix import LengthMix
from serve_app.planning.sizing.candidates import Candidate, FleetOptions, PlanResult
from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.search import Planner
from serve_app.planning.sizing.verification import Verification, Verifier, Workload, stand_in_share
from serve_app.simulation.workload import FittedTrace, choose_trace, fit

# Requests from which the model takes lengths when the number of requests is open.
_MODEL_REQUESTS = 20_000
# The least duration of a run, in seconds and in longest answers, and its least number of requests.
_LEAST_S = 60.0
_LONGEST_ANSWERS = 3
_LEAST_REQUESTS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The effort of the simulation.

    Attributes:
        seeds: of the final sizes; the search uses the first.
        stand_in_replicas: a larger undivided fleet is simulated at a share of its size and rate.
        jobs: parallel processes.
    """

    seeds: Sequence[int] = (0, 1, 2)
    stand_in_replicas: int = 24
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.stand_in_replicas < 4:
            raise ValueError(f"a stand-in needs at least 4 replicas, got {self.stand_in_replicas}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of a search, with its workload.

    Attributes:
        demand: with the number of requests of a run.
        workload: of the first seed, without requests that the profile cannot hold.
        verifier: with every fleet that it has simulated.
        twice: the stand-in of each chosen fleet at twice its size and rate, with the first seed, by the name
            of the fleet. It shows the error of a stand-in. Empty when fleets were simulated at full size.
    """

    demand: Workload
    workload: FittedTrace
    verifier: Verifier
    result: PlanResult
    twice: Mapping[str, Verification]


def make_plan(
    options: FleetOptions,
    demand: Workload,
    costs: CostTable,
    effort: Effort,
    on_step: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Search for the cheapest fleets.

    Args:
        on_step: called after each fleet that has been sized, at most `steps(options)` times.

    Raises:
        ServeAppError: a trace, a profile or a setting does not exist.
    """
    workload = _workload(options, demand)
    mix = LengthMix.of(workload.trace, output_known=demand.output_known)
    planner = Planner(options, demand, mix, costs, on_step)
    undivided = planner.paged[0]
    share = stand_in_share(sum(undivided.counts.values()), effort.stand_in_replicas)
    demand = _with_requests(demand, share, mix, undivided)
    verifier = Verifier(demand, share=share, jobs=effort.jobs)
    result = planner.search(verifier, effort.seeds)
    chosen = (result.worst_case, result.paged, result.pools) if share < 1 else ()
    twice = {
        one.plan.name: verifier.at_twice_the_size(one.plan, one.verification.counts, effort.seeds[:1])
        for one in chosen
        if one is not None
    }
    return Plan(demand=demand, workload=workload, verifier=verifier, result=result, twice=twice)


def steps(options: FleetOptions) -> int:
    """The most fleets that a search sizes by simulation."""
    return 1 + 2 * options.candidates


def _workload(options: FleetOptions, demand: Workload) -> FittedTrace:
    choice = demand.trace
    if choice.requests is None:
        choice = replace(choice, requests=_MODEL_REQUESTS)
    return fit(choose_trace(choice, 0), load_profile(options.profile).max_model_len)


def _with_requests(demand: Workload, share: float, mix: LengthMix, undivided: Candidate) -> Workload:
    """Set the requests of a run: enough that queues fill, which takes several of the longest answers."""
    if demand.trace.requests is not None:
        return demand
    (model,) = undivided.plan.models(mix).values()
    (count,) = undivided.counts.values()
    point = model.at_rate(demand.rate_per_s / count)
    iteration_s = (demand.slo.tpot_s or 0.1) if point is None else point.iteration_s
    lasts_s = max(_LEAST_S, _LONGEST_ANSWERS * float(mix.outputs.max()) * iteration_s)
    requests = max(_LEAST_REQUESTS, math.ceil(share * demand.rate_per_s * lasts_s))
    return replace(demand, trace=replace(demand.trace, requests=requests))
