"""A plan, from the workload to the result: the size of a run, the scale, the search for a fleet.

- `Planner`, `make_plan`: the search. The queueing model sizes and ranks all candidates, and the simulator
  sizes the best of them. Its numbers are the result. One pool and two pools have the same choice of profiles
  and batch settings. Otherwise the gain of a better setting would look like a saving by splitting.
- `configuration`: a complete file for a planned fleet, accepted by `check` and `simulate --config`.
- `plan_as_json`, `fleets_table`, `verdict`: the output: JSON, a table, and one sentence.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from serve_app.core import SchedulerSettings
from serve_app.core.settings_base import as_config
from serve_app.engines.model.roofline import load_profile
from serve_app.errors import SettingsError
from serve_app.lab.planning import queueing
from serve_app.lab.planning.queueing import (
    WORST_CASE,
    CostTable,
    FleetPlan,
    LengthMix,
    PoolPlan,
    ReplicaCounts,
    SizedPool,
    size,
    sized_pool,
)
from serve_app.lab.planning.verification import (
    Verification,
    Verifier,
    Workload,
    at_full_size,
    scale_share,
    smallest_fleet,
)
from serve_app.lab.simulation.run import EngineChanges, FittedTrace, choose_trace, fit, set_path
from serve_app.lab.simulation.simulation import ReplicaPlan
from serve_app.lab.tables import interval_text, number_text, table_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of a search.

    Attributes:
        profile: profile of the undivided fleets; any pool may use it too.
        short_profiles, long_profiles: further profiles for a pool. Those that can hold the longest requests
            are candidates for the undivided fleet as well.
        b_short_tokens: values of `B_short` to try.
        worst_case_slots: `max_num_seqs` of the worst-case fleet; None for KV cache over longest context.
        variants: whether to try other batch settings than the profiles' own.
        candidates: number of two-pool fleets, and of undivided ones, to simulate.
    """

    profile: str
    short_profiles: tuple[str, ...] = ()
    long_profiles: tuple[str, ...] = ()
    b_short_tokens: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    worst_case_slots: int | None = None
    variants: bool = True
    candidates: int = 3

    def __post_init__(self) -> None:
        if not self.b_short_tokens or min(self.b_short_tokens) < 1:
            raise SettingsError(f"values of B_short must be positive, got {self.b_short_tokens}")
        if self.candidates < 1:
            raise SettingsError(f"at least one candidate must be simulated, got {self.candidates}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fleet, sized by the model at full size, and its price."""

    plan: FleetPlan
    pools: dict[str, SizedPool]
    usd_per_hour: float

    @property
    def counts(self) -> dict[str, int]:
        """Replicas by pool."""
        return {pool: sized.replicas for pool, sized in self.pools.items()}

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key: within the limits first, then cheaper, then less utilised."""
        beyond = not all(sized.within_limits for sized in self.pools.values())
        return beyond, self.usd_per_hour, sum(sized.performance.utilisation for sized in self.pools.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFleet:
    """A fleet, sized by the simulator.

    Attributes:
        candidate: the model's size, at which the search began.
        verification: of the simulated fleet, which is scaled down if `share` is below 1.
        headroom: factor by which the rate of a scaled-down fleet can grow, see `Verifier.headroom`.
        counts: replicas by pool at full size.
        usd_per_hour: price of the whole fleet.
    """

    candidate: Candidate
    verification: Verification
    share: float
    headroom: float
    counts: ReplicaCounts
    usd_per_hour: float
    gpus: int

    @property
    def plan(self) -> FleetPlan:
        """The kind of fleet."""
        return self.candidate.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Result of a search. A fleet is None if no simulated one met the limits.

    Attributes:
        modelled: the best two-pool fleet by the model, for each `B_short`.
        simulated: all fleets that were sized by simulation.
    """

    worst_case: SizedFleet | None
    paged: SizedFleet | None
    pools: SizedFleet | None
    modelled: tuple[Candidate, ...]
    simulated: tuple[SizedFleet, ...]

    @property
    def chosen(self) -> list[SizedFleet]:
        """The smallest fleet of each kind that meets the limits."""
        return [one for one in (self.worst_case, self.paged, self.pools) if one is not None]

    @property
    def best(self) -> SizedFleet | None:
        """The cheaper of one paged pool and several pools; one pool if they cost the same."""
        found = [one for one in (self.paged, self.pools) if one is not None]
        return min(found, key=lambda one: one.usd_per_hour, default=None)


# A pool with a smaller share of the requests does not justify its reserve.
_MIN_SHARE = 0.002
# Token budgets per iteration to try besides the profile's: a smaller one protects TPOT, a larger one shortens
# prefills.
_BATCHED_TOKENS = (1_024, 8_192)
# Chunk limits to try, as multiples of the chunk that does not delay decoding. No limit (0) suits a pool of
# long prompts only, because no short prompt waits there.
_CHUNKS = (2, 4)


@dataclass(eq=False)
class Planner:
    """Search through the options for one workload.

    Attributes:
        mix: lengths of the workload's requests, as the engines receive them.
        on_step: called with the name of each fleet that has been sized.
    """

    options: FleetOptions
    demand: Workload
    mix: LengthMix
    costs: CostTable
    on_step: Callable[[str], object] = lambda _: None

    # -- by the model -------------------------------------------------------------------------------------

    def worst_case(self) -> Candidate:
        """Return the papers' baseline."""
        slots = self.options.worst_case_slots or queueing.worst_case_slots(self.options.profile)
        return self._sized(queueing.worst_case_fleet(self.options.profile, slots))

    @cached_property
    def paged(self) -> list[Candidate]:
        """Undivided fleets with paged KV cache, cheapest first."""
        options = self.options
        longest = int(self.mix.totals.max())
        profiles = _distinct((options.profile, *options.long_profiles, *options.short_profiles))
        able = [name for name in profiles if load_profile(name).max_model_len >= longest]
        pools = [pool for name in able or [options.profile] for pool in self._pools(name)]
        plans = [queueing.paged_fleet(self._within_context(pool)) for pool in pools]
        return sorted((self._sized(plan) for plan in plans), key=lambda one: one.rank)

    def split(self) -> list[Candidate]:
        """Return the best two-pool fleet for each value of `B_short`, in order."""
        found = (self._best_split(boundary) for boundary in sorted(set(self.options.b_short_tokens)))
        return [candidate for candidate in found if candidate is not None]

    def _best_split(self, boundary: int) -> Candidate | None:
        """Choose each pool separately, because pools are independent in the model, which has no spill."""
        options, mix = self.options, self.mix
        parts = mix.split(boundary)
        if min(len(part) for part in parts) < _MIN_SHARE * len(mix):
            return None
        longest = int(mix.totals.max())
        chosen = []
        for part, extra, context in zip(
            parts, (options.short_profiles, options.long_profiles), (boundary, longest), strict=True
        ):
            profiles = [
                name
                for name in _distinct((options.profile, *extra))
                if load_profile(name).max_model_len >= context
            ]
            pools = [pool for name in profiles or [options.profile] for pool in self._pools(name)]
            rate_per_s = self.demand.rate_per_s * len(part) / len(mix)
            chosen.append(min(pools, key=lambda pool: self._pool_rank(pool, part, rate_per_s, boundary)))
        return self._sized(queueing.split_fleet(chosen[0], self._within_context(chosen[1]), boundary))

    def _within_context(self, pool: PoolPlan) -> PoolPlan:
        """Limit the context to the undivided fleet's, so that all fleets receive the same requests."""
        context = load_profile(self.options.profile).max_model_len
        if load_profile(pool.profile).max_model_len <= context:
            return pool
        return replace(pool, engine=replace(pool.engine, max_model_len=context))

    def _pool_rank(
        self, pool: PoolPlan, part: LengthMix, rate_per_s: float, boundary: int
    ) -> tuple[bool, float, float]:
        # The plan of an undivided fleet is also the plan of one pool.
        plan = replace(queueing.paged_fleet(pool), b_short_tokens=boundary)
        (model,) = plan.models(part).values()
        sized = sized_pool(model, rate_per_s, self.demand.slo)
        usd_per_hour = sized.replicas * self.costs.usd_per_hour(pool.profile)
        return not sized.within_limits, usd_per_hour, sized.performance.utilisation

    def _pools(self, profile: str) -> list[PoolPlan]:
        return [PoolPlan(profile=profile, engine=engine) for engine in self._variants(profile)]

    def _variants(self, name: str) -> list[EngineChanges]:
        """Return the profile's settings first, then other budgets and chunk limits, and more sequences."""
        plain = EngineChanges()
        if not self.options.variants:
            return [plain]
        profile = load_profile(name)
        budgets = [
            tokens
            for tokens in _BATCHED_TOKENS
            if tokens != profile.max_num_batched_tokens and tokens >= profile.max_num_seqs
        ]
        others = [replace(plain, max_num_batched_tokens=tokens) for tokens in budgets]
        if chunk := profile.step_time.chunk_tokens():
            others += [
                replace(plain, long_prefill_token_threshold=times * chunk)
                for times in _CHUNKS
                if times * chunk <= profile.max_num_batched_tokens
            ]
            # Without a chunk limit the budget limits the chunk.
            others += [
                replace(plain, long_prefill_token_threshold=0, max_num_batched_tokens=tokens)
                for tokens in [None, *budgets]
            ]
        sequences = 2 * profile.max_num_seqs
        budget = max(sequences, profile.max_num_batched_tokens)
        others.append(replace(plain, max_num_seqs=sequences, max_num_batched_tokens=budget))
        return [plain, *others]

    def _sized(self, plan: FleetPlan) -> Candidate:
        pools = size(plan, self.mix, self.demand.rate_per_s, self.demand.slo)
        counts = {pool: sized.replicas for pool, sized in pools.items()}
        return Candidate(plan=plan, pools=pools, usd_per_hour=plan.usd_per_hour(counts, self.costs))

    # -- by the simulator ---------------------------------------------------------------------------------

    def search(self, verifier: Verifier, seeds: Sequence[int]) -> PlanResult:
        """Size the worst case, the best undivided fleets and the best pools, and choose the cheapest."""
        modelled = self.split()
        undivided = self._with_plain_first(self.paged)
        worst_case = self._simulated(verifier, [self.worst_case()], seeds)
        paged = self._simulated(verifier, undivided, seeds)
        ranked = sorted(modelled, key=lambda one: one.rank)[: self.options.candidates]
        pools = self._simulated(verifier, ranked, seeds)
        return PlanResult(
            worst_case=_cheapest(worst_case),
            paged=_cheapest(paged),
            pools=_cheapest(pools),
            modelled=tuple(modelled),
            simulated=(*worst_case, *paged, *pools),
        )

    def _with_plain_first(self, undivided: list[Candidate]) -> list[Candidate]:
        """Return the model's best candidates after the unchanged profile, because the model may be wrong."""
        plain = queueing.paged_fleet(PoolPlan(profile=self.options.profile))
        first = [one for one in undivided if one.plan == plain]
        others = [one for one in undivided if one.plan != plain]
        return [*first, *others][: max(1, self.options.candidates)]

    def _simulated(
        self, verifier: Verifier, candidates: Iterable[Candidate], seeds: Sequence[int]
    ) -> list[SizedFleet]:
        found = []
        for candidate in candidates:
            guess = {pool: max(1, round(verifier.share * n)) for pool, n in candidate.counts.items()}
            verification = smallest_fleet(verifier, candidate.plan, guess, costs=self.costs, seeds=seeds)
            self.on_step(candidate.plan.name)
            if verification is None:
                continue
            headroom = 1.0
            # The worst case costs far more than a replica above the others, so it needs no finer size.
            if verifier.share < 1 and candidate.plan.name != queueing.WORST_CASE:
                headroom = verifier.headroom(candidate.plan, verification.counts, seeds)
            counts = {
                pool: at_full_size(count, verifier.share, headroom)
                for pool, count in verification.counts.items()
            }
            found.append(
                SizedFleet(
                    candidate=candidate,
                    verification=verification,
                    share=verifier.share,
                    headroom=headroom,
                    counts=counts,
                    usd_per_hour=candidate.plan.usd_per_hour(counts, self.costs),
                    gpus=candidate.plan.gpus(counts),
                )
            )
        return found


def _cheapest(fleets_found: Sequence[SizedFleet]) -> SizedFleet | None:
    return min(fleets_found, key=lambda one: one.usd_per_hour, default=None)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# Number of requests from which the model takes lengths if the number is not given.
_MODEL_REQUESTS = 20_000
# Minimum duration of a run, in seconds and in longest outputs, and its minimum number of requests.
_MIN_DURATION_S = 60.0
_LONGEST_OUTPUTS = 3
_MIN_REQUESTS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Effort of the simulation.

    Attributes:
        seeds: seeds of the final sizes; the search uses the first.
        max_simulated_replicas: a larger undivided fleet is simulated at a share of its size and rate.
    """

    seeds: Sequence[int] = (0, 1, 2)
    max_simulated_replicas: int = 24
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.max_simulated_replicas < 4:
            raise ValueError(f"max_simulated_replicas must be at least 4, got {self.max_simulated_replicas}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Result of a search, with its workload.

    Attributes:
        demand: the demand, including the number of requests per run.
        workload: of the first seed, without requests that the profile cannot hold.
        verifier: the verifier that has simulated the fleets.
        double_scale: each chosen fleet at twice its simulated size and rate, with the first seed, by name of
            the fleet. It shows the error of scaling down. Empty if fleets were simulated at full size.
    """

    demand: Workload
    workload: FittedTrace
    verifier: Verifier
    result: PlanResult
    double_scale: Mapping[str, Verification]


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
    share = scale_share(sum(undivided.counts.values()), effort.max_simulated_replicas)
    demand = _with_requests(demand, share, mix, undivided)
    verifier = Verifier(demand, share=share, jobs=effort.jobs)
    result = planner.search(verifier, effort.seeds)
    chosen = result.chosen if share < 1 else []
    double_scale = {
        one.plan.name: verifier.at_double_scale(one.plan, one.verification.counts, effort.seeds[:1])
        for one in chosen
    }
    return Plan(demand=demand, workload=workload, verifier=verifier, result=result, double_scale=double_scale)


def steps(options: FleetOptions) -> int:
    """Return the maximum number of fleets that a search sizes by simulation."""
    return 1 + 2 * options.candidates


def _workload(options: FleetOptions, demand: Workload) -> FittedTrace:
    choice = demand.trace
    if choice.requests is None:
        choice = replace(choice, requests=_MODEL_REQUESTS)
    return fit(choose_trace(choice, 0), load_profile(options.profile).max_model_len)


def _with_requests(demand: Workload, share: float, mix: LengthMix, undivided: Candidate) -> Workload:
    """Set the requests of a run: enough to fill the queues, which takes several of the longest outputs."""
    if demand.trace.requests is not None:
        return demand
    (model,) = undivided.plan.models(mix).values()
    (count,) = undivided.counts.values()
    point = model.at_rate(demand.rate_per_s / count)
    iteration_s = (demand.slo.tpot_s or 0.1) if point is None else point.iteration_s
    lasts_s = max(_MIN_DURATION_S, _LONGEST_OUTPUTS * float(mix.outputs.max()) * iteration_s)
    requests = max(_MIN_REQUESTS, math.ceil(share * demand.rate_per_s * lasts_s))
    return replace(demand, trace=replace(demand.trace, requests=requests))


# Ray's accelerator types of the GPUs in profile names.
_RAY_TYPES = {"a100": "A100", "h100": "H100", "h200": "H200", "l40s": "L40S", "l4": "L4", "b200": "B200"}

_HEADER = """\
# Planned for {rate:g} requests/s with a P99 TTFT of {ttft:g} s and a P99 TPOT of {tpot:g} ms.
# ${usd:,.2f} per hour, {gpus:,} GPUs.
# {engines}
"""
_EMULATED = "Engines are emulated with the profiles of the plan; `--model NAME` selects vLLM engines instead."
_VLLM = "Batch settings are those of the plan. Use `autoscaling` instead of `replicas` to follow the load."


def configuration(one: SizedFleet, demand: Workload, costs: CostTable, model: str | None = None) -> str:
    """Return the file, with vLLM engines of `model` (hub name or folder), or emulated ones without."""
    header = _HEADER.format(
        rate=demand.rate_per_s,
        ttft=demand.slo.ttft_s,
        tpot=1_000 * (demand.slo.tpot_s or 0),
        usd=one.usd_per_hour,
        gpus=one.gpus,
        engines=_EMULATED if model is None else _VLLM,
    )
    application = {
        "name": "ewsjf",
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "args": {"models": [_model(one, demand, costs, model)], "gateways": {"replicas": 1, "num_cpus": 0.2}},
    }
    document = {
        "proxy_location": "Disabled",
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }
    return header + yaml.safe_dump(document, sort_keys=False, width=110)


def _model(one: SizedFleet, demand: Workload, costs: CostTable, model: str | None) -> dict[str, Any]:
    plans = one.plan.settings(dict.fromkeys(one.plan.pools, 1)).plans(isolated=True)
    scheduler: dict[str, Any] = {"policy": demand.policy}
    for path, value in demand.scheduler.items():
        set_path(scheduler, path, value)
    if len(plans) > 1:
        set_path(scheduler, "routing.b_short_tokens", one.plan.b_short_tokens)
    return {
        "name": "planned" if model is None else model.rstrip("/").rpartition("/")[2],
        "pools": [_pool(one, plan, costs, model) for plan in plans],
        "scheduler": as_config(SchedulerSettings, scheduler),
    }


def _pool(one: SizedFleet, plan: ReplicaPlan, costs: CostTable, model: str | None) -> dict[str, Any]:
    profile, limits = one.plan.pools[plan.pool].profile, plan.engine
    usual = {"max_model_len": limits.max_model_len, "max_num_seqs": limits.max_num_seqs}
    batched = {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
    }
    gpus = load_profile(profile).gpus
    engine: dict[str, Any]
    if model is None:
        engine = {"emulated": {"profile": profile, **usual, "advanced": batched}}
        resources: dict[str, Any] = {"num_cpus": 0.1}
    else:
        args = usual | batched | ({"tensor_parallel_size": gpus} if gpus > 1 else {})
        engine = {"vllm": {"model": model, "args": args}}
        kind = _RAY_TYPES.get(costs.gpu_of(profile))
        resources = {"num_cpus": 1.0, "num_gpus": gpus} | ({} if kind is None else {"accelerator_type": kind})
    pool = {
        "name": plan.pool,
        "engine": engine,
        "resources": resources,
        "replicas": one.counts[plan.pool],
    }
    return pool | {"advanced": {"cost": round(costs.usd_per_hour(profile), 4)}}


@dataclass(frozen=True, slots=True)
class Saving:
    """Cost of one fleet compared with another.

    Attributes:
        ratio: share of the other's cost that is saved; negative if it costs more.
        resolution: finest step as a share of the other's cost: one replica, or a quarter if scaled down.
    """

    ratio: float
    resolution: float


def saving(of: SizedFleet, against: SizedFleet) -> Saving:
    """Return the saving of a fleet against another."""
    steps = [
        (0.25 if one.share < 1 and one.plan.name != WORST_CASE else 1.0)
        * one.usd_per_hour
        / sum(one.verification.counts.values())
        / against.usd_per_hour
        for one in (of, against)
    ]
    return Saving(1 - of.usd_per_hour / against.usd_per_hour, max(steps))


def plan_as_json(result: PlanResult) -> dict[str, Any]:
    """Return the chosen fleets with their verification and saving, the verdict, and the search."""
    return {
        "fleets": [_fleet(one, result) for one in result.chosen],
        "verdict": verdict(result),
        "simulated": [_simulated(one) for one in result.simulated],
        "modelled": [_modelled(one) for one in result.modelled],
    }


def _fleet(one: SizedFleet, result: PlanResult) -> dict[str, Any]:
    verification = one.verification
    savings: dict[str, Any] = {}
    for baseline in (result.worst_case, result.paged):
        if baseline is not None and baseline is not one:
            measured = saving(one, baseline)
            savings[baseline.plan.name] = {"simulated": measured.ratio, "resolution": measured.resolution}
    return _simulated(one) | {
        "replicas": sum(one.counts.values()),
        "per_pool": {pool: _pool_row(one, pool) for pool in one.plan.pools},
        "p99_ttft_s": None if verification.ttft is None else verification.ttft.mean,
        "p99_tpot_s": None if verification.tpot is None else verification.tpot.mean,
        "preemptions": sum(run.preemptions for run in verification.runs),
        "savings": savings,
        "simulated_share": one.share,
    }


def _pool_row(one: SizedFleet, pool: str) -> dict[str, Any]:
    return {
        "replicas": one.counts[pool],
        "profile": one.plan.pools[pool].profile,
        **one.verification.pool_figures(pool),
    }


def _simulated(one: SizedFleet) -> dict[str, Any]:
    return {
        "name": one.plan.name,
        "replicas": dict(one.counts),
        "gpus": one.gpus,
        "usd_per_hour": one.usd_per_hour,
        "headroom": one.headroom,
        "model_replicas": one.candidate.counts,
        "verification": one.verification.as_json(),
    } | one.plan.as_json()


def _modelled(one: Candidate) -> dict[str, Any]:
    return {
        "replicas": one.counts,
        "usd_per_hour": one.usd_per_hour,
        "within_limits": {pool: sized.within_limits for pool, sized in one.pools.items()},
    } | one.plan.as_json()


def verdict(result: PlanResult) -> str:
    """Return whether splitting pays, in one sentence."""
    paged, pools = result.paged, result.pools
    if paged is None:
        return "No single pool with paged KV meets the limits: relax the limits, or choose another profile."
    baseline = f"one paged pool (${paged.usd_per_hour:,.2f} per hour, {paged.gpus:,} GPUs)"
    if pools is None:
        return f"Splitting does not pay: no simulated pair of pools meets the limits; {baseline} does."
    measured = saving(pools, paged)
    split = (
        f"a short and a long pool with B_short = {pools.plan.b_short_tokens:,} "
        f"(${pools.usd_per_hour:,.2f} per hour, {pools.gpus:,} GPUs)"
    )
    exact = f"sizes are exact to {measured.resolution:.1%}, {len(pools.verification.runs)} seeds"
    if measured.ratio <= 0:
        more = f"costs {-measured.ratio:.1%} more than" if measured.ratio else "costs the same as"
        return f"Splitting does not pay: {split} {more} {baseline}; {exact}."
    pays = "pays" if measured.ratio > measured.resolution else "hardly pays"
    return f"Splitting {pays}: {split} costs {measured.ratio:.1%} less than {baseline}; {exact}."


def fleets_table(result: PlanResult) -> str:
    """Return all simulated fleets with sizes and tail latencies; > marks the fleet to choose."""
    head = [
        *("fleet", "settings", "B_short", "replicas", "by the model", "GPUs", "$/hour", "saves"),
        *("P99 TTFT s", "P99 TTFT of long s", "P99 TPOT ms", "preempted ‰"),
    ]
    rows = [_fleet_row(one, result) for one in result.simulated]
    return table_text(head, rows, text_columns=2, key_columns=2)


def _fleet_row(one: SizedFleet, result: PlanResult) -> list[str]:
    found = one.verification
    mark = "> " if one is result.best else ""
    saved = None
    if result.paged is not None and one is not result.paged:
        saved = saving(one, result.paged).ratio
    return [
        mark + one.plan.name,
        "; ".join(dict.fromkeys(str(pool) for pool in one.plan.pools.values())),
        number_text(one.plan.b_short_tokens if len(one.plan.pools) > 1 else None),
        " + ".join(f"{count:,} {pool}" for pool, count in one.counts.items()),
        " + ".join(f"{count:,}" for count in one.candidate.counts.values()),
        number_text(one.gpus),
        number_text(one.usd_per_hour, 2),
        "-" if saved is None else f"{saved:+.1%}",
        interval_text(found.ttft, 2),
        interval_text(found.long_ttft, 2),
        interval_text(found.tpot, 1, 1_000),
        number_text(found.preemptions_per_mille, 2),
    ]
