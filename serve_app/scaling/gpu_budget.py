"""Who gets the next GPU when the pools need more than there are.

Every pool first gets its minimum. Then pools without any get one. After that the pool whose replicas would
have the most to do, by need over replicas, gets the next one, until nothing fits or nobody needs more. That
evens out the shortage. Of equal pools the one listed first is served, which is the one of short requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """What a pool asks for.

    Attributes:
        replicas: number of replicas.
        needed: the same before rounding and bounds.
        least: number that it has in any case.
        gpus: of one replica.
    """

    replicas: int
    needed: float
    least: int
    gpus: float


def share_gpus(needs: Mapping[str, PoolNeed], budget: float | None) -> dict[str, int]:
    """Replicas of each pool, within the budget; without one, all that they ask for."""
    if budget is None or sum(need.replicas * need.gpus for need in needs.values()) <= budget:
        return {pool: need.replicas for pool, need in needs.items()}
    given = {pool: min(need.replicas, need.least) for pool, need in needs.items()}
    left = budget - sum(needs[pool].gpus * count for pool, count in given.items())
    while pool := _next(needs, given, left):
        given[pool] += 1
        left -= needs[pool].gpus
    return given


def _next(needs: Mapping[str, PoolNeed], given: Mapping[str, int], left: float) -> str:
    """The pool that gets the next replica; empty when none fits or is asked for."""
    asking = [
        pool for pool, need in needs.items() if given[pool] < need.replicas and need.gpus <= left + 1e-9
    ]
    # A pool without any comes before those that have some.
    return max(
        asking,
        key=lambda pool: (given[pool] == 0, needs[pool].needed / max(1, given[pool])),
        default="",
    )
