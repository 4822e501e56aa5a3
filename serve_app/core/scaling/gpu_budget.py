"""The GPU budget: distribution of GPUs if the pools need more than there are.

Every pool first gets its minimum. Then pools without replicas get one. After that the pool with the highest
need per replica gets the next one, until none fits or none is needed. That balances the shortage. Among
equal pools the one listed first is served, which is the one for short requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """The need of one pool.

    Attributes:
        needed: the same before rounding and bounds.
        least: replicas that it has in any case.
    """

    replicas: int
    needed: float
    least: int
    gpus: float


def share_gpus(needs: Mapping[str, PoolNeed], budget: float | None) -> dict[str, int]:
    """Return the replicas of each pool within the budget; without a budget, all that they need."""
    if budget is None or sum(need.replicas * need.gpus for need in needs.values()) <= budget:
        return {pool: need.replicas for pool, need in needs.items()}
    allocated = {pool: min(need.replicas, need.least) for pool, need in needs.items()}
    left = budget - sum(needs[pool].gpus * count for pool, count in allocated.items())
    while pool := _next(needs, allocated, left):
        allocated[pool] += 1
        left -= needs[pool].gpus
    return allocated


def _next(needs: Mapping[str, PoolNeed], allocated: Mapping[str, int], left: float) -> str:
    """Return the pool that gets the next replica, or an empty string if none fits or is needed."""
    candidates = [
        pool for pool, need in needs.items() if allocated[pool] < need.replicas and need.gpus <= left + 1e-9
    ]
    # A pool without replicas precedes the others.
    return max(
        candidates,
        key=lambda pool: (allocated[pool] == 0, needs[pool].needed / max(1, allocated[pool])),
        default="",
    )
