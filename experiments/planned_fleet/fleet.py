"""The fleet that the planner sizes, and the application that serves exactly these pools and replicas."""

from typing import Any

from serve_app.bench.connection import BenchError
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.metrics.slo import Slo
from serve_app.planning.plan import Effort, make_plan
from serve_app.planning.sizing.candidates import FleetOptions, SizedFleet
from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.verification import Workload
from serve_app.settings_base import as_written, settings
from serve_app.simulation.workload import TraceChoice, at_rate, choose_trace, fit
from serve_app.workloads.trace import Trace

MODEL = "planned"
# Nobody is refused for having waited: the plan's simulation refuses nobody either.
PATIENCE_S = 3_600.0
_LEAST_REQUESTS = 10


@settings
class PlannedFleetSettings:
    """What is planned and played.

    Attributes:
        seconds: of each live run.
        repeats: live runs, with the seeds 0, 1, ...
        slo_ttft_s, slo_tpot_s: limits of the P99.
        b_short_tokens: borders that the planner tries.
        plan_requests: in each of the plan's simulations.
    """

    trace: str
    profile: str
    rate_per_s: float
    seconds: float
    repeats: int
    slo_ttft_s: float
    slo_tpot_s: float
    b_short_tokens: tuple[int, ...]
    plan_requests: int
    plan_seeds: int

    @property
    def slo(self) -> Slo:
        """Limits of the P99."""
        return Slo(ttft_s=self.slo_ttft_s, tpot_s=self.slo_tpot_s)

    def choice(self) -> TraceChoice:
        """As many requests as come in a live run, before those that no engine can take are left out."""
        requests = max(_LEAST_REQUESTS, round(self.seconds * self.rate_per_s))
        return TraceChoice(name=self.trace, requests=requests, arrivals="poisson")

    def demand(self) -> Workload:
        """What is planned for."""
        trace = TraceChoice(name=self.trace, requests=self.plan_requests, arrivals="poisson")
        return Workload(trace=trace, rate_per_s=self.rate_per_s, slo=self.slo)

    def live_trace(self, fleet: SizedFleet, seed: int) -> Trace:
        """The requests of a live run, as the simulation of that seed has them."""
        plans = fleet.plan.settings(dict.fromkeys(fleet.plan.pools, 1)).plans()
        longest = max(plan.engine.max_model_len for plan in plans)
        fitted = fit(choose_trace(self.choice(), seed), longest)
        return at_rate(fitted.trace, self.rate_per_s)


def planned(settings: PlannedFleetSettings) -> SizedFleet:
    """The two pools of the plan.

    Raises:
        BenchError: no two pools keep the limits, or there are too many replicas to be served here.
    """
    space = FleetOptions(profile=settings.profile, b_short_tokens=settings.b_short_tokens, candidates=1)
    effort = Effort(seeds=range(settings.plan_seeds))
    pools = make_plan(space, settings.demand(), CostTable.load(), effort).result.pools
    if pools is None:
        raise BenchError("no two pools keep the limits: relax them, or choose another profile")
    if pools.share < 1:
        raise BenchError(f"a fleet for {settings.rate_per_s:g} requests/s is too large: lower rate_per_s")
    return pools


def model(fleet: SizedFleet) -> dict[str, Any]:
    """A model in the planned pools, in front of emulated engines as the simulator has them."""
    scheduler = {
        "policy": fleet.verification.demand.policy,
        "max_waiting": 1_000_000,
        "queue_timeout_s": {"interactive": PATIENCE_S, "default": PATIENCE_S},
        "backpressure": {"tpot_gate_s": None},
        "routing": {"b_short_tokens": fleet.plan.b_short_tokens},
    }
    return {"name": MODEL, "pools": _pools(fleet), "scheduler": scheduler}


def _pools(fleet: SizedFleet) -> list[dict[str, Any]]:
    """Each planned pool as settings, with a fixed number of replicas."""
    one_of_each = fleet.plan.settings(dict.fromkeys(fleet.plan.pools, 1)).plans(isolated=True)
    return [
        {
            "name": plan.pool,
            "engine": {
                "emulated": as_written(
                    EmulatedEngineSettings,
                    {
                        "profile": fleet.plan.pools[plan.pool].profile,
                        "max_model_len": plan.engine.max_model_len,
                        "max_num_seqs": plan.engine.max_num_seqs,
                        "max_num_batched_tokens": plan.engine.max_num_batched_tokens,
                        "kv_tokens": plan.engine.kv_blocks * plan.engine.block_size,
                        "long_prefill_token_threshold": plan.engine.long_prefill_token_threshold,
                        "scheduling_policy": plan.engine.scheduling_policy.value,
                    },
                )
            },
            "resources": {"num_cpus": 0.05},
            "replicas": fleet.counts[plan.pool],
        }
        for plan in one_of_each
    ]
