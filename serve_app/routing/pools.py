"""Pool routing: the pools that may serve a request, by its token budget.

Routing is O(1), and its only state is `B_short` where that adapts.

Source: token-budget pool routing (arXiv 2604.09613), section "dispatch": hard limits first, then `B_short`,
and spill when the home pool has no capacity. Ours: a request is bound to a pool only when it is dispatched
(late binding). And a request is refused as too long by the lower bound of its length, so that an upper
estimate never refuses what an engine would accept.
"""

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Annotated

from serve_app.request import Request
from serve_app.routing.adaptive_b_short import (
    AdaptiveBShort,
    AdaptiveBShortSettings,
    BShortChanged,
)
from serve_app.routing.demand import PoolCapacity
from serve_app.routing.estimation.estimate import TokenEstimate
from serve_app.routing.replica_state import ReplicaState
from serve_app.settings_base import ADVANCED, at_least, settings, share_below


# As a file has it: `RoutingSettings` adds the names of the pools, which stand elsewhere in the file.
@settings(block="routing")
class WrittenRouting:
    """How requests are spread over the pools of a model.

    Attributes:
        b_short_tokens: token budget (prompt and output) up to which a request is at home in the first pool.
            None is 8,192, or what the first of two pools can hold, if that is less.
    """

    # 8,192 is the papers' value; by their analysis 4K to 16K keeps at least four fifths of the saving.
    b_short_tokens: Annotated[int | None, at_least(1)] = None
    # Share of a shorter pool's context kept free of requests with estimated lengths. vLLM does not refuse a
    # request whose prompt and max_tokens together exceed its context: it silently shortens the answer. So an
    # estimate must be wrong by more than this before an answer is cut. Exact lengths need no margin.
    cut_margin_ratio: Annotated[float, share_below(1), ADVANCED] = 0.1
    # Whether a request may go to the other pool when its own has no capacity. Off isolates the pools
    # strictly.
    spill: bool = True
    # Whether `b_short_tokens` follows the traffic; it is the initial value then.
    adaptive_b_short: AdaptiveBShortSettings = field(default_factory=AdaptiveBShortSettings)


@settings(block="routing")
class RoutingSettings(WrittenRouting):
    """How requests are spread over the pools of a model.

    Attributes:
        pools: names of the pools, the one with the shortest context first.
        b_short_tokens: as in `WrittenRouting`.
    """

    pools: tuple[str, ...] = ("short", "long")
    b_short_tokens: int = 8_192

    def __post_init__(self) -> None:
        if not 1 <= len(self.pools) <= 2:
            raise ValueError(f"a model has one or two pools, got {len(self.pools)}: {', '.join(self.pools)}")
        if len(set(self.pools)) != len(self.pools):
            raise ValueError(f"pool names must differ, got {', '.join(self.pools)}")
        adaptive = self.adaptive_b_short
        lowest, highest = adaptive.lowest(self.b_short_tokens), adaptive.b_short_max or self.b_short_tokens
        if adaptive.enabled and not lowest <= self.b_short_tokens <= highest:
            raise ValueError(
                f"b_short_tokens of {self.b_short_tokens} is the initial value, so it must lie between "
                f"adaptive_b_short.b_short_min and b_short_max, got {lowest} and {adaptive.b_short_max}"
            )


class PoolRouter:
    """Names the pools that may serve a request, its home first.

    Args:
        context_limit: the context limit of a pool in tokens, None while the pool has no replica.
    """

    def __init__(self, settings: RoutingSettings, context_limit: Callable[[str], int | None]) -> None:
        self._settings = settings
        self._context_limit = context_limit
        adapts = settings.adaptive_b_short.enabled and len(settings.pools) == 2
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
        short, long = (self._capacity(pool, replicas) for pool in self._settings.pools)
        return adaptive.adapt(short, long, now)

    def route(self, request: Request, estimate: TokenEstimate, *, above_tokens: int = 0) -> tuple[str, ...]:
        """Pools for a request in order of preference; empty when no pool can hold it.

        A pool without replicas has no known limit: it may be a request's home, but no request spills into it.
        Waiting requests are routed again when limits become known.

        Args:
            above_tokens: only pools with a longer context than this, after an engine refused it as too long.
        """
        settings = self._settings
        budget = estimate.budget_tokens
        order = settings.pools if budget <= self.b_short_tokens else settings.pools[::-1]
        holds: list[str] = []
        for pool in order:
            limit = self._context_limit(pool)
            if limit is None:
                if not holds and not (above_tokens and pool == settings.pools[0]):
                    holds.append(pool)
            elif budget <= self._usable(pool, limit, request) and limit > above_tokens:
                holds.append(pool)
        if holds:
            return tuple(holds) if settings.spill else (holds[0],)
        return self._last_resort(request, estimate, above_tokens)

    def _capacity(self, pool: str, replicas: Iterable[ReplicaState]) -> PoolCapacity | None:
        limit = self._context_limit(pool)
        members = [state for state in replicas if state.joined and state.spec.pool == pool]
        if limit is None or not members:
            return None
        paces = [state.report.tpot_s for state in members if state.report and state.report.tpot_s]
        return PoolCapacity(
            kv_tokens=sum(state.kv_budget for state in members),
            sequences=sum(state.spec.max_num_seqs for state in members),
            context_tokens=limit,
            tpot_s=sum(paces) / len(paces) if paces else None,
        )

    def _usable(self, pool: str, limit: int, request: Request) -> int:
        if pool == self._settings.pools[-1] or request.shape.prompt_tokens is not None:
            return limit
        return int(limit * (1 - self._settings.cut_margin_ratio))

    def _last_resort(self, request: Request, estimate: TokenEstimate, above_tokens: int) -> tuple[str, ...]:
        """The pool with the longest context, for a request that is too long by the upper estimate only."""
        longest = self._settings.pools[-1]
        limit = self._context_limit(longest)
        if limit is None or limit <= above_tokens or least_budget_tokens(request, estimate) > limit:
            return ()
        return (longest,)

    def longest_context(self) -> int | None:
        """The longest context limit of any pool with replicas, in tokens."""
        limits = [limit for pool in self._settings.pools if (limit := self._context_limit(pool)) is not None]
        return max(limits, default=None)


def least_budget_tokens(request: Request, estimate: TokenEstimate) -> int:
    """The smallest context limit under which vLLM would accept the request.

    vLLM reduces `max_tokens` to what the prompt leaves of the context. So it refuses only a prompt that
    leaves no token for the answer, and a `max_tokens` that alone is above the limit.
    """
    output_tokens = 1 if request.spec.max_output_tokens is None else request.spec.max_output_tokens
    return max(estimate.least_prompt_tokens + min(1, output_tokens), output_tokens)
