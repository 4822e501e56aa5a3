"""The work ahead of a request under fair shares, from sums, so that its cost hardly grows with the tenants.

While all that a tenant has waiting is served, every other tenant is served as much in proportion to its
weight, and the request that it is at:

    ahead = sum over tenants of min(tokens, own * weight / own weight + tokens / waiting)

The first term is the smaller one as soon as `own / own weight` reaches the tenant's *turning point*,
`(tokens - tokens / waiting) / weight`. So tenants are kept in buckets by turning point, eight to the octave,
with the sums of both terms. Only in the bucket of `own / own weight` itself each tenant is looked at. One
with a single request has its turning point at 0.

Sums are of whole numbers, so that they do not drift.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.scheduling.queueing.fairness import TenantWeights

_PER_OCTAVE = 8
# Of a tenant's mean request, and of its weight.
_FRACTION_BITS = 32
_ONE = 1 << _FRACTION_BITS
# The bucket of those whose turning point is 0, below all others.
_SINGLE = -(1 << 30)


class HasWaiting(Protocol):
    """A tenant's waiting requests, and their tokens."""

    waiting: int
    tokens: int


@dataclass(slots=True)
class _Waiting:
    """What one tenant has waiting.

    Attributes:
        mean: tokens of its average request, in fractions.
        weight_ratio: its weight, in fractions.
    """

    tokens: int
    mean: int
    weight: float
    weight_ratio: int
    turns_at: float
    bucket: int


@dataclass(slots=True)
class _Bucket:
    """The tenants with about the same turning point, and the sums of what they have waiting."""

    tokens: int = 0
    means: int = 0
    weights: int = 0
    tenants: dict[str, _Waiting] = field(default_factory=dict)

    def add(self, name: str, waiting: _Waiting) -> None:
        self.tokens += waiting.tokens
        self.means += waiting.mean
        self.weights += waiting.weight_ratio
        self.tenants[name] = waiting

    def remove(self, name: str) -> None:
        waiting = self.tenants.pop(name)
        self.tokens -= waiting.tokens
        self.means -= waiting.mean
        self.weights -= waiting.weight_ratio


class FairWork:
    """The waiting tenants of one class.

    Args:
        waiting: what each tenant has waiting; it is looked up when it is asked for.

    Attributes:
        tokens: of all that waits.
    """

    def __init__(self, waiting: Mapping[str, HasWaiting], weights: TenantWeights) -> None:
        self._waiting = waiting
        self._weights = weights
        self._changed: set[str] = set()
        self._tenants: dict[str, _Waiting] = {}
        self._buckets: dict[int, _Bucket] = {}
        self.tokens = 0

    def note(self, tenant: str, tokens: int) -> None:
        """A tenant has so many more tokens waiting, or less, or another weight."""
        self.tokens += tokens
        self._changed.add(tenant)

    def _put(self, tenant: str, tokens: int, waiting: int, weight: float) -> None:
        turns_at = (tokens - tokens / waiting) / weight
        bucket = math.floor(_PER_OCTAVE * math.log2(turns_at)) if turns_at > 0 else _SINGLE
        mean, weight_ratio = (tokens << _FRACTION_BITS) // waiting, round(weight * _ONE)
        one = self._tenants[tenant] = _Waiting(tokens, mean, weight, weight_ratio, turns_at, bucket)
        if bucket not in self._buckets:
            self._buckets[bucket] = _Bucket()
        self._buckets[bucket].add(tenant, one)

    def ahead(self, tenant: str) -> int:
        """Tokens of this class that are served before a request that arrives for a tenant."""
        if not self.tokens:
            return 0
        self._catch_up()
        weight = self._weights.of(tenant)
        own_tenant = self._tenants.get(tenant)
        own = 0 if own_tenant is None else own_tenant.tokens
        level = own / weight
        at = math.floor(_PER_OCTAVE * math.log2(level)) if level > 0 else _SINGLE
        tokens = means = weights = 0
        partly = 0.0
        for place, bucket in self._buckets.items():
            if place < at or place == _SINGLE:
                tokens += bucket.tokens
            elif place > at:
                means += bucket.means
                weights += bucket.weights
            else:
                partly = sum(
                    min(one.tokens, own * one.weight / weight + one.mean / _ONE)
                    for one in bucket.tenants.values()
                )
        # What others have is rounded: its own requests are whole.
        return own + round(tokens - own + partly + own * weights / (weight * _ONE) + means / _ONE)

    def _catch_up(self) -> None:
        """Most who come to an idle fleet have left before anybody asks for them."""
        for name in self._changed:
            self._take_out(name)
            if (one := self._waiting.get(name)) is not None and one.waiting:
                self._put(name, one.tokens, one.waiting, self._weights.of(name))
        self._changed.clear()

    def _take_out(self, tenant: str) -> None:
        one = self._tenants.pop(tenant, None)
        if one is None:
            return
        bucket = self._buckets[one.bucket]
        bucket.remove(tenant)
        if not bucket.tenants:
            del self._buckets[one.bucket]

    def __repr__(self) -> str:
        return f"<FairWork of {len(self._tenants)} tenants, {self.tokens} tokens>"
