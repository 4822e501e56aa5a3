"""Pool routing: selects the pools that may serve a request by its token budget.

- `PoolRouter`: the pools of a request, in order. It is O(pools) and has no state.
- `ArrivedWork`: the work that has arrived, by home pool, as counters that only increase; readers compute
  rates.

`PoolRouter`. Pools are ordered by context, those with the same context by cost. Each has a *boundary*, the
largest budget for which it is the home pool: `B_short` for the first pool, its context for a pool in the
middle unless configured, and none for the last. The home pool of a request is the first pool whose boundary
its budget does not exceed. If the home pool has no capacity, the request spills into the pools above it, the
next one first, and then into those below it. Pools that cannot hold its budget are excluded.

Source: token-budget pool routing (arXiv 2604.09613), section "dispatch": hard limits first, then `B_short`,
and spill when the home pool has no capacity; it has two pools. Ours: any number of pools, and a request is
bound to a pool only when it is dispatched (late binding). A request is rejected as too long by the lower
bound of its length, so that an upper estimate never rejects what an engine would accept.

`ArrivedWork`. Requests rejected for lack of capacity count, because a fleet that is too small rejects most of
the demand to which it should scale. Requests rejected for other reasons, such as the limits of a key, do not
count. Nor do batch requests, because they use only capacity that others leave.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.settings_base import ADVANCED, at_least, settings
from serve_app.request import PriorityClass, Request


@dataclass(slots=True)
class PoolArrivals:
    """The work that has arrived for one pool.

    Attributes:
        prefill_tokens: prompt tokens that were not expected to be cached.
        output_tokens: expected tokens of the answers.
    """

    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0


class ArrivedWork:
    """The counters of all pools of a model."""

    def __init__(self, pools: Iterable[str]) -> None:
        self._pools = {pool: PoolArrivals() for pool in pools}

    def add(
        self,
        pools: Sequence[str],
        request: Request,
        estimate: TokenEstimate,
        cached_tokens: int = 0,
        *,
        by_floor: bool = False,
    ) -> None:
        """Count a request for its home pool, unless no pool can hold it.

        Batch work counts only when its floor dispatches it: what is beyond the floor needs no replica.
        """
        if not pools or (request.priority is PriorityClass.BATCH and not by_floor):
            return
        arrivals = self._pools[pools[0]]
        arrivals.requests += 1
        arrivals.prefill_tokens += max(0, estimate.expected_prompt_tokens - cached_tokens)
        arrivals.output_tokens += estimate.expected_output_tokens

    def __getitem__(self, pool: str) -> PoolArrivals:
        return self._pools[pool]

    def __repr__(self) -> str:
        return f"<ArrivedWork {self._pools}>"


# The part that is written in a file. `RoutingSettings` adds the pools, which are configured elsewhere in the
# file.
@settings(block="routing")
class RoutingConfig:
    """Distribution of requests over the pools of a model.

    Attributes:
        b_short_tokens: token budget (prompt and output) up to which the first pool is the home pool. The
            default with two pools of different contexts is 8,192, or what the first pool can hold, if that is
            less. With more pools, or two of the same context, it is what the first pool can hold.
    """

    # 8,192 is the papers' value; by their analysis 4K to 16K retains at least four fifths of the saving.
    b_short_tokens: Annotated[int | None, at_least(1)] = None
    # Allow a request to use another pool that can hold it if its home pool has no capacity. False isolates
    # the pools strictly.
    spill: Annotated[bool, ADVANCED] = True


@settings(block="routing")
class RoutingSettings(RoutingConfig):
    """Distribution of requests over the pools of a model.

    Attributes:
        pools: names of the pools, the one with the shortest context first.
        b_short_tokens: as in `RoutingConfig`.
        boundaries_tokens: for each pool between the first and the last, the token budget up to which it is
            the home pool; None is what its context holds. Empty is None for all.
        costs: relative price of a replica of each pool. Of pools with the same context, the cheapest precedes
            the others, wherever it is listed. Empty is the same for all.
    """

    pools: tuple[str, ...] = ("short", "long")
    b_short_tokens: int = 8_192
    boundaries_tokens: tuple[int | None, ...] = ()
    costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("a model needs at least one pool, got none")
        if len(set(self.pools)) != len(self.pools):
            raise ValueError(f"pool names must differ, got {', '.join(self.pools)}")
        if self.boundaries_tokens and len(self.boundaries_tokens) != len(self.pools) - 2:
            raise ValueError(
                f"boundaries_tokens must have one value for each pool between the first and the last, got "
                f"{len(self.boundaries_tokens)} for {len(self.pools)} pools"
            )
        if self.costs and (len(self.costs) != len(self.pools) or min(self.costs) <= 0):
            raise ValueError(f"costs must have one positive value for each pool, got {self.costs}")
        given = [self.b_short_tokens, *(each for each in self.boundaries_tokens if each is not None)]
        if given != sorted(given):
            raise ValueError(f"the boundaries between pools must increase, b_short_tokens first, got {given}")


class PoolRouter:
    """Selects the pools that may serve a request, the home pool first.

    Args:
        context_limit: returns the context limit of a pool in tokens, or None if it has no replica. It may be
            learned from rejections.
        reported_limit: the same for reported limits only. Requests are rejected only by these.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        context_limit: Callable[[str], int | None],
        reported_limit: Callable[[str], int | None] | None = None,
    ) -> None:
        self._settings = settings
        self._context_limit = context_limit
        self._reported_limit = reported_limit or context_limit
        self._last = last = len(settings.pools) - 1
        # By the position of the home pool: from there upwards, then downwards.
        self._preferences = [
            (*range(home, last + 1), *range(home - 1, -1, -1)) for home in range(len(settings.pools))
        ]
        self._costs = dict(zip(settings.pools, settings.costs, strict=False))
        self._costs_differ = len(set(settings.costs)) > 1
        self._boundaries = dict(zip(settings.pools[1:-1], settings.boundaries_tokens, strict=False))

    def __repr__(self) -> str:
        return f"<PoolRouter {self._settings.b_short_tokens}>"

    def order(self) -> tuple[str, ...]:
        """Return all pools by context as listed, and by cost if neighbours have the same context."""
        pools = self._settings.pools
        if not self._costs_differ:
            return pools
        ordered: list[str] = []
        for limit, neighbours in groupby(pools, key=self._context_limit):
            # Unknown contexts do not count as equal.
            group = list(neighbours)
            ordered += group if limit is None else sorted(group, key=self._costs.__getitem__)
        return tuple(ordered)

    def route(self, request: Request, estimate: TokenEstimate, *, above_tokens: int = 0) -> tuple[str, ...]:
        """Return pools for a request in order of preference, empty if no pool can hold it.

        A pool without replicas has no known limit: it may be a request's home pool, but no request spills
        into it. Queued requests are routed again when limits become known.

        Args:
            above_tokens: only pools with a longer context than this, after an engine rejected it as too long.
        """
        order = self.order() if self._costs_differ else self._settings.pools
        budget = estimate.budget_tokens
        home = 0 if budget <= self._settings.b_short_tokens else self._home_above(budget, order)
        holds: list[str] = []
        unknown: str | None = None
        for place in self._preferences[home]:
            pool = order[place]
            limit = self._context_limit(pool)
            if limit is not None:
                if limit > above_tokens and budget <= limit:
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

    def _home_above(self, budget: int, order: tuple[str, ...]) -> int:
        """Return the position of the first pool above the first one whose boundary a budget does not exceed.

        Skips a pool whose boundary is its context if that is unknown.
        """
        for place in range(1, self._last):
            boundary = self._boundaries.get(order[place])
            if boundary is None:
                boundary = self._context_limit(order[place])
            if boundary is not None and budget <= boundary:
                return place
        return self._last

    def _is_shorter(self, place: int, order: tuple[str, ...], above_tokens: int) -> bool:
        """Return whether a pool of unknown context cannot hold what one with `above_tokens` rejected."""
        longer = (self._context_limit(pool) for pool in order[place + 1 :])
        return place == 0 or any(limit is not None and limit <= above_tokens for limit in longer)

    def _last_resort(
        self, request: Request, estimate: TokenEstimate, above_tokens: int, order: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the pool with the longest context if only the upper estimate of a request is too long."""
        longest = order[-1]
        limit, reported = self._context_limit(longest), self._reported_limit(longest)
        if limit is None or reported is None or limit <= above_tokens:
            return ()
        return () if least_budget_tokens(request, estimate) > reported else (longest,)

    def longest_context(self) -> int | None:
        """Return the longest reported context limit of any pool with replicas, in tokens."""
        limits = [limit for pool in self._settings.pools if (limit := self._reported_limit(pool)) is not None]
        return max(limits, default=None)


def least_budget_tokens(request: Request, estimate: TokenEstimate) -> int:
    """Return the smallest context limit under which vLLM would accept the request.

    vLLM reduces `max_tokens` to what the prompt leaves of the context. It rejects only a prompt that leaves
    no token for the answer, and a `max_tokens` that alone exceeds the limit.
    """
    output_tokens = 1 if request.spec.max_output_tokens is None else request.spec.max_output_tokens
    return max(estimate.least_prompt_tokens + min(1, output_tokens), output_tokens)
