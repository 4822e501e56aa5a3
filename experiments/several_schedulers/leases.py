"""Who may use which part of the fleet: tenants to schedulers by hash, and leases by demand.

A replica's capacity is cut into *slices*: a part of its batch, of its KV cache and of the places in its
engine's queue. A slice is leased to one scheduler at a time, so nobody can promise what another has promised.
"""

import hashlib
from collections.abc import Mapping, Sequence

# Demand that a scheduler without any is given, as a share of the fleet: its next request finds a slice.
_IDLE_SHARE = 0.02


def scheduler_of(tenant: str, schedulers: int) -> int:
    """The scheduler of a tenant, by rendezvous hashing: few tenants move when the number changes."""

    def weight(scheduler: int) -> bytes:
        return hashlib.blake2b(f"{scheduler}/{tenant}".encode(), digest_size=8).digest()

    return max(range(schedulers), key=weight)


def share_leases(demands: Sequence[Mapping[str, float]], slices: int) -> list[int]:
    """How many slices each scheduler gets.

    Tenants get what they ask for as long as there is enough. Otherwise the least demanding are served in
    full, and the others alike (max-min), whichever scheduler they are at. What nobody asks for is divided in
    proportion, and every scheduler gets at least one slice.

    Args:
        demands: of each scheduler, by tenant, as a share of the whole fleet.
        slices: of the whole fleet, at least one for each scheduler.

    Raises:
        ValueError: there are fewer slices than schedulers.
    """
    if slices < len(demands):
        raise ValueError(f"{len(demands)} schedulers need a slice each, got {slices}: cut replicas finer")
    level = _level([demand for tenants in demands for demand in tenants.values()])
    shares = [_IDLE_SHARE / len(demands) + sum(min(one, level) for one in each.values()) for each in demands]
    free = slices - len(demands)
    exact = [free * share / sum(shares) for share in shares]
    counts = [1 + int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: (int(exact[place]) - exact[place], place))
    for place in by_remainder[: slices - sum(counts)]:
        counts[place] += 1
    return counts


def _level(demands: Sequence[float]) -> float:
    """The most that a tenant gets, so that all of them together get no more than there is."""
    left = 1.0
    ordered = sorted(demands)
    for place, demand in enumerate(ordered):
        even = left / (len(ordered) - place)
        if demand > even:
            return even
        left -= demand
    return float("inf")
