"""The search for the cheapest fleet: the model ranks candidates, the simulator sizes the best of them.

One pool and two pools have the same choice of profiles and batch settings. Otherwise the gain of a better
setting would look like a saving by splitting. The model sizes every variant. The best ones are simulated, and
the simulator's numbers are the result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from serve_app.engine_model.profiles import load_profile
from serve_app.planning.model.closed_form import ClosedForm
from serve_app.planning.model.length_mix import LengthMix
from serve_app.planning.sizing import fleets
from serve_app.planning.sizing.candidates import Candidate, FleetOptions, PlanResult, SizedFleet
from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.fleets import FleetPlan, PoolPlan
from serve_app.planning.sizing.modelled import closed_form, size, sized_pool
from serve_app.planning.sizing.smallest import smallest_fleet
from serve_app.planning.sizing.verification import Verification, Verifier, Workload, at_full_size
from serve_app.simulation.fleet import EngineChanges

# A pool with a smaller share of the requests is not worth its reserve.
_LEAST_SHARE = 0.002
# Budgets per iteration to try besides the profile's own: a smaller one protects TPOT, a larger one shortens
# prefills.
_BATCHED_TOKENS = (1_024, 8_192)
# Chunk limits to try, as multiples of the chunk that does not delay decoding. No limit (0) suits a pool where
# every prompt is long, because no short prompt waits there.
_CHUNKS = (2, 4)


class Planner:
    """Searches the options for one workload.

    Args:
        mix: lengths of the workload's requests, as the engines get them.
        on_step: called with the name of each fleet that has been sized.
    """

    def __init__(
        self,
        options: FleetOptions,
        demand: Workload,
        mix: LengthMix,
        costs: CostTable,
        on_step: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._options = options
        self._demand = demand
        self._mix = mix
        self._costs = costs
        self._on_step = on_step

    # -- by the model -------------------------------------------------------------------------------------

    def worst_case(self) -> Candidate:
        """The papers' baseline."""
        slots = self._options.worst_case_slots or fleets.worst_case_slots(self._options.profile)
        return self._sized(fleets.worst_case_fleet(self._options.profile, slots))

    @cached_property
    def paged(self) -> list[Candidate]:
        """Undivided fleets with paged KV, the cheapest first."""
        options = self._options
        longest = int(self._mix.totals.max())
        profiles = _distinct((options.profile, *options.long_profiles, *options.short_profiles))
        able = [name for name in profiles if load_profile(name).max_model_len >= longest]
        pools = [pool for name in able or [options.profile] for pool in self._pools(name)]
        plans = [fleets.paged_fleet(self._within_context(pool)) for pool in pools]
        return sorted((self._sized(plan) for plan in plans), key=lambda one: one.rank)

    def split(self) -> list[Candidate]:
        """The best two-pool fleet for each value of `B_short`, in order."""
        found = (self._best_split(border) for border in sorted(set(self._options.b_short_tokens)))
        return [candidate for candidate in found if candidate is not None]

    def _best_split(self, border: int) -> Candidate | None:
        """Choose each pool by itself: in the model, without spill, pools are independent."""
        options, mix = self._options, self._mix
        parts = mix.split(border)
        if min(len(part) for part in parts) < _LEAST_SHARE * len(mix):
            return None
        longest = int(mix.totals.max())
        chosen = []
        for part, extra, context in zip(
            parts, (options.short_profiles, options.long_profiles), (border, longest), strict=True
        ):
            profiles = [
                name
                for name in _distinct((options.profile, *extra))
                if load_profile(name).max_model_len >= context
            ]
            pools = [pool for name in profiles or [options.profile] for pool in self._pools(name)]
            rate_per_s = self._demand.rate_per_s * len(part) / len(mix)
            chosen.append(min(pools, key=lambda pool: self._pool_rank(pool, part, rate_per_s, border)))
        return self._sized(fleets.split_fleet(chosen[0], self._within_context(chosen[1]), border))

    def _within_context(self, pool: PoolPlan) -> PoolPlan:
        """Limit the context to the undivided fleet's, so that all fleets get the same requests."""
        context = load_profile(self._options.profile).max_model_len
        if load_profile(pool.profile).max_model_len <= context:
            return pool
        return replace(pool, engine=replace(pool.engine, max_model_len=context))

    def _pool_rank(
        self, pool: PoolPlan, part: LengthMix, rate_per_s: float, border: int
    ) -> tuple[bool, float, float]:
        # The plan of an undivided fleet is also the plan of one pool.
        plan = replace(fleets.paged_fleet(pool), b_short_tokens=border)
        (model,) = plan.models(part).values()
        sized = sized_pool(model, rate_per_s, self._demand.slo)
        usd_per_hour = sized.replicas * self._costs.usd_per_hour(pool.profile)
        return not sized.within_limits, usd_per_hour, sized.performance.utilisation

    def _pools(self, profile: str) -> list[PoolPlan]:
        return [PoolPlan(profile=profile, engine=engine) for engine in self._variants(profile)]

    def _variants(self, name: str) -> list[EngineChanges]:
        """The profile's own settings first, then other budgets and chunk limits, and more sequences."""
        plain = EngineChanges()
        if not self._options.variants:
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
        pools = size(plan, self._mix, self._demand.rate_per_s, self._demand.slo)
        counts = {pool: sized.replicas for pool, sized in pools.items()}
        return Candidate(plan=plan, pools=pools, usd_per_hour=plan.usd_per_hour(counts, self._costs))

    # -- by the simulator ---------------------------------------------------------------------------------

    def search(self, verifier: Verifier, seeds: Sequence[int]) -> PlanResult:
        """Size the worst case, the best undivided fleets and the best pools, and choose the cheapest."""
        modelled = self.split()
        undivided = self._with_plain_first(self.paged)
        worst_case = self._simulated(verifier, [self.worst_case()], seeds)
        paged = self._simulated(verifier, undivided, seeds)
        ranked = sorted(modelled, key=lambda one: one.rank)[: self._options.candidates]
        pools = self._simulated(verifier, ranked, seeds)
        best_paged, best_pools = _cheapest(paged), _cheapest(pools)
        return PlanResult(
            worst_case=_cheapest(worst_case),
            paged=best_paged,
            pools=best_pools,
            modelled=tuple(modelled),
            simulated=(*worst_case, *paged, *pools),
            against_paged=self._closed_form(best_paged, best_pools),
            against_worst_case=self._closed_form(_cheapest(worst_case), best_pools),
        )

    def _with_plain_first(self, undivided: list[Candidate]) -> list[Candidate]:
        """The model's best candidates, after the unchanged profile: the model may be wrong."""
        plain = fleets.paged_fleet(PoolPlan(profile=self._options.profile))
        first = [one for one in undivided if one.plan == plain]
        others = [one for one in undivided if one.plan != plain]
        return [*first, *others][: max(1, self._options.candidates)]

    def _simulated(
        self, verifier: Verifier, candidates: Iterable[Candidate], seeds: Sequence[int]
    ) -> list[SizedFleet]:
        found = []
        for candidate in candidates:
            guess = {pool: max(1, round(verifier.share * n)) for pool, n in candidate.counts.items()}
            verification = smallest_fleet(verifier, candidate.plan, guess, costs=self._costs, seeds=seeds)
            self._on_step(candidate.plan.name)
            if verification is not None:
                headroom = 1.0
                # The worst case costs far more than a replica above the others, so it needs no finer size.
                if verifier.share < 1 and candidate.plan.name != fleets.WORST_CASE:
                    headroom = verifier.headroom(candidate.plan, verification.counts, seeds)
                found.append(self._at_full_size(candidate, verification, verifier.share, headroom))
        return found

    def _at_full_size(
        self, candidate: Candidate, verification: Verification, share: float, headroom: float
    ) -> SizedFleet:
        counts = {pool: at_full_size(count, share, headroom) for pool, count in verification.counts.items()}
        return SizedFleet(
            candidate=candidate,
            verification=verification,
            share=share,
            headroom=headroom,
            counts=counts,
            usd_by_pool={
                pool: count * self._costs.usd_per_hour(candidate.plan.pools[pool].profile)
                for pool, count in counts.items()
            },
            gpus=candidate.plan.gpus(counts),
        )

    def _closed_form(self, undivided: SizedFleet | None, divided: SizedFleet | None) -> ClosedForm | None:
        if undivided is None or divided is None:
            return None
        return closed_form(undivided.plan, divided.plan, self._mix, self._demand.slo, self._costs)


def _cheapest(fleets_found: Sequence[SizedFleet]) -> SizedFleet | None:
    return min(fleets_found, key=lambda one: one.usd_per_hour, default=None)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
