"""Pool routing: the pools that may serve a request, by its token budget.

Pools stand in the order of their context, those with the same context in the order of their cost. Each has a
*boundary*, the largest budget that is at home in it: `B_short` for the first pool, its own context for a pool
in the middle unless another value is given, and none for the last. A request is at home in the first pool
whose boundary its budget does not exceed. When that one has no capacity, the request spills into the pools
above it, the next one first, and then into those below it. Pools that cannot hold its budget are left out.

Routing is O(pools), and its only state is `B_short` where that adapts.

Source: token-budget pool routing (arXiv 2604.09613), section "dispatch": hard limits first, then `B_short`,
and spill when the home pool has no capacity; it has two pools. Ours: any number of them, and a request is
bound to a pool only when it is dispatched (late binding). And a request is refused as too long by the lower
bound of its length, so that an upper estimate never refuses what an engine would accept.
"""

from collections.abc import Callable, Iterable
from dataclasses import field
from itertools import groupby
from typing import Annotated

from serve_app.core.routing.adaptive_b_short import (
    AdaptiveBShort,
    AdaptiveBShortSettings,
    BShortChanged,
    PoolCapacity,
)
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import ADVANCED, INTERNAL, at_least, settings, share_below
from serve_app.request import Request

_ADAPTIVE_POOLS = 2


# As a file has it: `RoutingSettings` adds the names of the pools, which stand elsewhere in the file.
@settings(block="routing")
class WrittenRouting:
    """How requests are spread over the pools of a model.

    Attributes:
        b_short_tokens: token budget (prompt and output) up to which a request is at home in the first pool.
            None is 8,192 with two pools of different contexts, or what the first can hold, if that is less.
            With more pools, or where both have the same context, it is what the first can hold.
    """

    # 8,192 is the papers' value; by their analysis 4K to 16K keeps at least four fifths of the saving.
    b_short_tokens: Annotated[int | None, at_least(1)] = None
    # Share of a shorter pool's context kept free of requests with estimated lengths. vLLM does not refuse a
    # request whose prompt and max_tokens together exceed its context: it silently shortens the answer. So an
    # estimate must be wrong by more than this before an answer is cut. Exact lengths need no margin.
    cut_margin_ratio: Annotated[float, share_below(1), INTERNAL] = 0.1
    # Whether a request may go to another pool that can hold it when its own has no capacity. Off isolates the
    # pools strictly.
    spill: Annotated[bool, ADVANCED] = True
    # Whether `b_short_tokens` follows the traffic; it is the initial value then. Of two pools only.
    adaptive_b_short: Annotated[AdaptiveBShortSettings, ADVANCED] = field(
        default_factory=AdaptiveBShortSettings
    )


@settings(block="routing")
class RoutingSettings(WrittenRouting):
    """How requests are spread over the pools of a model.

    Attributes:
        pools: their names, the one with the shortest context first.
        b_short_tokens: as in `WrittenRouting`.
        boundaries_tokens: for each pool between the first and the last, the token budget up to which a
            request is at home in it; None is what its context holds. Empty is None for all.
        costs: relative price of a replica of each pool; of pools with the same context, the cheapest is the
            first in order, wherever it is listed. Empty is the same for all.
    """

    pools: tuple[str, ...] = ("short", "long")
    b_short_tokens: int = 8_192
    boundaries_tokens: tuple[int | None, ...] = ()
    costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("a model has at least one pool, got none")
        if len(set(self.pools)) != len(self.pools):
            raise ValueError(f"pool names must differ, got {', '.join(self.pools)}")
        if self.boundaries_tokens and len(self.boundaries_tokens) != len(self.pools) - 2:
            raise ValueError(
                f"boundaries_tokens has one value for each pool between the first and the last, got "
                f"{len(self.boundaries_tokens)} for {len(self.pools)} pools"
            )
        if self.costs and (len(self.costs) != len(self.pools) or min(self.costs) <= 0):
            raise ValueError(f"costs has one positive value for each pool, got {self.costs}")
        given = [self.b_short_tokens, *(each for each in self.boundaries_tokens if each is not None)]
        if given != sorted(given):
            raise ValueError(f"the boundaries between pools must rise, b_short_tokens first, got {given}")
        self._check_adaptive()

    def _check_adaptive(self) -> None:
        adaptive = self.adaptive_b_short
        if not adaptive.enabled:
            return
        if len(self.pools) > _ADAPTIVE_POOLS:
            raise ValueError(
                f"adaptive_b_short balances two pools, got {', '.join(self.pools)}: switch it off, and set "
                "b_short_tokens"
            )
        lowest, highest = adaptive.lowest(self.b_short_tokens), adaptive.b_short_max or self.b_short_tokens
        if not lowest <= self.b_short_tokens <= highest:
            raise ValueError(
                f"b_short_tokens of {self.b_short_tokens} is the initial value, so it must lie between "
                f"adaptive_b_short.b_short_min and b_short_max, got {lowest} and {adaptive.b_short_max}"
            )


class PoolRouter:
    """Names the pools that may serve a request, its home first.

    Args:
        context_limit: the context limit of a pool in tokens, None while the pool has no replica.
        told_limit: the same as engines tell it; `context_limit` may be learned from what they refuse, and no
            request is refused by that.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        context_limit: Callable[[str], int | None],
        told_limit: Callable[[str], int | None] | None = None,
    ) -> None:
        self._settings = settings
        self._context_limit = context_limit
        self._told_limit = told_limit or context_limit
        self._last = last = len(settings.pools) - 1
        self._uncut_ratio = 1 - settings.cut_margin_ratio
        # By the place of the home: from there upwards, then downwards.
        self._preferences = [
            (*range(home, last + 1), *range(home - 1, -1, -1)) for home in range(len(settings.pools))
        ]
        self._costs = dict(zip(settings.pools, settings.costs, strict=False))
        self._costs_differ = len(set(settings.costs)) > 1
        self._boundaries = dict(zip(settings.pools[1:-1], settings.boundaries_tokens, strict=False))
        adapts = settings.adaptive_b_short.enabled and len(settings.pools) == _ADAPTIVE_POOLS
        self._adaptive = (
            AdaptiveBShort(settings.adaptive_b_short, settings.b_short_tokens) if adapts else None
        )

    def __repr__(self) -> str:
        return f"<PoolRouter {self.b_short_tokens} {self._adaptive or 'fixed'}>"

    @property
    def b_short_tokens(self) -> int:
        """The current `B_short`, in tokens."""
        return self._settings.b_short_tokens if self._adaptive is None else self._adaptive.b_short_tokens

    def restore(self, b_short_tokens: int, now: float) -> None:
        """Continue from the value of an earlier process, where `B_short` adapts."""
        if self._adaptive is not None:
            self._adaptive.restore(b_short_tokens, now)

    def on_arrival(self, estimate: TokenEstimate) -> float:
        """A request waits or runs from now on; returns a mark to give to `on_departure`."""
        if self._adaptive is None:
            return 0.0
        return self._adaptive.demand.on_arrival(estimate.budget_tokens, estimate.expected_tokens)

    def on_departure(self, estimate: TokenEstimate, arrival_mark: float) -> None:
        """A request has ended.

        Args:
            arrival_mark: what `on_arrival` returned.
        """
        if self._adaptive is not None:
            self._adaptive.demand.on_departure(estimate.budget_tokens, estimate.expected_tokens, arrival_mark)

    def adapt(self, replicas: Iterable[ReplicaState], now: float) -> BShortChanged | None:
        """Move `B_short` if that is due; waiting requests have to be routed again then.

        Args:
            replicas: those of all pools.
        """
        adaptive = self._adaptive
        if adaptive is None or not adaptive.is_due(now):
            return None
        short, long = (self._capacity(pool, replicas) for pool in self.order())
        return adaptive.adapt(short, long, now)

    def order(self) -> tuple[str, ...]:
        """All pools, by context as they are listed, and by cost where neighbours have the same context."""
        pools = self._settings.pools
        if not self._costs_differ:
            return pools
        ordered: list[str] = []
        for limit, neighbours in groupby(pools, key=self._context_limit):
            # Contexts that are not known are not the same.
            group = list(neighbours)
            ordered += group if limit is None else sorted(group, key=self._costs.__getitem__)
        return tuple(ordered)

    def route(self, request: Request, estimate: TokenEstimate, *, above_tokens: int = 0) -> tuple[str, ...]:
        """Pools for a request in order of preference; empty when no pool can hold it.

        A pool without replicas has no known limit: it may be a request's home, but no request spills into it.
        Waiting requests are routed again when limits become known.

        Args:
            above_tokens: only pools with a longer context than this, after an engine refused it as too long.
        """
        order = self.order() if self._costs_differ else self._settings.pools
        budget, is_exact = estimate.budget_tokens, request.shape.prompt_tokens is not None
        home = 0 if budget <= self.b_short_tokens else self._home_above(budget, order, is_exact=is_exact)
        holds: list[str] = []
        unknown: str | None = None
        for place in self._preferences[home]:
            pool = order[place]
            limit = self._context_limit(pool)
            if limit is not None:
                if limit > above_tokens and budget <= self._usable(limit, place, is_exact=is_exact):
                    holds.append(pool)
            elif unknown is None and not (above_tokens and self._is_shorter(place, order, above_tokens)):
                unknown = pool
                if place == home:
                    holds.append(pool)
        if not holds and unknown is not None:
            return (unknown,)
        if holds:
            return tuple(holds) if self._settings.spill else (holds[0],)
        return self._last_resort(request, estimate, above_tokens, order)

    def _home_above(self, budget: int, order: tuple[str, ...], *, is_exact: bool) -> int:
        """Place of the first pool after the first one whose boundary a budget does not exceed.

        A pool whose boundary is its context, which is not known, is passed over.
        """
        for place in range(1, self._last):
            boundary = self._boundaries.get(order[place])
            if boundary is None and (limit := self._context_limit(order[place])) is not None:
                boundary = self._usable(limit, place, is_exact=is_exact)
            if boundary is not None and budget <= boundary:
                return place
        return self._last

    def _usable(self, limit: int, place: int, *, is_exact: bool) -> int:
        """The largest budget that goes into a pool with this context limit."""
        return limit if is_exact or place == self._last else int(limit * self._uncut_ratio)

    def _is_shorter(self, place: int, order: tuple[str, ...], above_tokens: int) -> bool:
        """Whether a pool of unknown context cannot hold what an engine with `above_tokens` refused."""
        longer = (self._context_limit(pool) for pool in order[place + 1 :])
        return place == 0 or any(limit is not None and limit <= above_tokens for limit in longer)

    def _capacity(self, pool: str, replicas: Iterable[ReplicaState]) -> PoolCapacity | None:
        limit = self._context_limit(pool)
        members = [state for state in replicas if state.joined and state.spec.pool == pool]
        if limit is None or not members:
            return None
        paces = [state.report.tpot_s for state in members if state.report and state.report.tpot_s]
        return PoolCapacity(
            kv_tokens=sum(state.kv_budget for state in members),
            sequences=sum(state.likely_num_seqs for state in members),
            context_tokens=limit,
            tpot_s=sum(paces) / len(paces) if paces else None,
        )

    def _last_resort(
        self, request: Request, estimate: TokenEstimate, above_tokens: int, order: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The pool with the longest context, for a request that is too long by the upper estimate only."""
        longest = order[-1]
        limit, told = self._context_limit(longest), self._told_limit(longest)
        if limit is None or told is None or limit <= above_tokens:
            return ()
        return () if least_budget_tokens(request, estimate) > told else (longest,)

    def longest_context(self) -> int | None:
        """The longest context limit of any pool with replicas, in tokens."""
        limits = [limit for pool in self._settings.pools if (limit := self._told_limit(pool)) is not None]
        return max(limits, default=None)


def least_budget_tokens(request: Request, estimate: TokenEstimate) -> int:
    """The smallest context limit under which vLLM would accept the request.

    vLLM reduces `max_tokens` to what the prompt leaves of the context. So it refuses only a prompt that
    leaves no token for the answer, and a `max_tokens` that alone is above the limit.
    """
    output_tokens = 1 if request.spec.max_output_tokens is None else request.spec.max_output_tokens
    return max(estimate.least_prompt_tokens + min(1, output_tokens), output_tokens)
