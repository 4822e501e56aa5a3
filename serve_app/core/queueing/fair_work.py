"""The work ahead of a request under fair shares, from sums, so that its cost hardly grows with the tenants.

By the time all queued requests of a tenant are served, every other tenant has received at most service in
proportion to its weight, plus its current request:

    ahead = sum over tenants of min(tokens, own * weight / own weight + tokens / requests)

The first term is the smaller one once `own / own weight` reaches the tenant's *turning point*,
`(tokens - tokens / requests) / weight`. So tenants are grouped in buckets by turning point, eight buckets
per factor of two, with the sums of both terms. Only in the bucket of `own / own weight` each tenant is
evaluated separately. A tenant with a single request has its turning point at 0.

The sums are integers, so that they do not drift.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.core.queueing.fairness import TenantWeights

_BUCKETS_PER_OCTAVE = 8
# Resolution of a tenant's mean request and weight in fixed-point numbers.
_FRACTION_BITS = 32
_ONE = 1 << _FRACTION_BITS
# The bucket for a turning point of 0, below all others.
_SINGLE = -(1 << 30)


class HasBacklog(Protocol):
    """The number and tokens of a tenant's queued requests."""

    waiting: int
    tokens: int


@dataclass(slots=True)
class _TenantBacklog:
    """The queued requests of one tenant.

    Attributes:
        fixed_mean_tokens: tokens of its average request, as a fixed-point number.
        fixed_weight: its weight, as a fixed-point number.
        bucket: index of the bucket of its turning point.
    """

    tokens: int
    fixed_mean_tokens: int
    weight: float
    fixed_weight: int
    bucket: int


@dataclass(slots=True)
class _Bucket:
    """The tenants with similar turning points, and the sums of their queued work."""

    tokens: int = 0
    fixed_mean_tokens: int = 0
    fixed_weights: int = 0
    tenants: dict[str, _TenantBacklog] = field(default_factory=dict)

    def add(self, name: str, backlog: _TenantBacklog) -> None:
        self.tokens += backlog.tokens
        self.fixed_mean_tokens += backlog.fixed_mean_tokens
        self.fixed_weights += backlog.fixed_weight
        self.tenants[name] = backlog

    def remove(self, name: str) -> None:
        backlog = self.tenants.pop(name)
        self.tokens -= backlog.tokens
        self.fixed_mean_tokens -= backlog.fixed_mean_tokens
        self.fixed_weights -= backlog.fixed_weight


class FairWork:
    """The queued work of the tenants of one class.

    Args:
        queued: queued requests by tenant; read lazily.
    """

    def __init__(self, queued: Mapping[str, HasBacklog], weights: TenantWeights) -> None:
        self._queued = queued
        self._weights = weights
        self._changed: set[str] = set()
        self._backlogs: dict[str, _TenantBacklog] = {}
        self._buckets: dict[int, _Bucket] = {}
        self.tokens = 0

    def update(self, tenant: str, tokens: int) -> None:
        """Record that a tenant's queued tokens changed by `tokens`, or its weight changed."""
        self.tokens += tokens
        self._changed.add(tenant)

    def _insert(self, tenant: str, tokens: int, requests: int, weight: float) -> None:
        bucket = _bucket((tokens - tokens / requests) / weight)
        fixed_mean_tokens, fixed_weight = (tokens << _FRACTION_BITS) // requests, round(weight * _ONE)
        backlog = _TenantBacklog(tokens, fixed_mean_tokens, weight, fixed_weight, bucket)
        self._backlogs[tenant] = backlog
        if bucket not in self._buckets:
            self._buckets[bucket] = _Bucket()
        self._buckets[bucket].add(tenant, backlog)

    def ahead(self, tenant: str) -> int:
        """Return the tokens of this class that are served before a request that arrives for a tenant."""
        if not self.tokens:
            return 0
        self._apply_changes()
        weight = self._weights.of(tenant)
        own = self._backlogs.get(tenant)
        own_tokens = 0 if own is None else own.tokens
        own_bucket = _bucket(own_tokens / weight)
        tokens = fixed_mean_tokens = fixed_weights = 0
        at_boundary = 0.0
        for index, bucket in self._buckets.items():
            if index < own_bucket or index == _SINGLE:
                tokens += bucket.tokens
            elif index > own_bucket:
                fixed_mean_tokens += bucket.fixed_mean_tokens
                fixed_weights += bucket.fixed_weights
            else:
                at_boundary = sum(
                    min(each.tokens, own_tokens * each.weight / weight + each.fixed_mean_tokens / _ONE)
                    for each in bucket.tenants.values()
                )
        # The tenant's own tokens are whole; only the part of the others is rounded.
        proportional = own_tokens * fixed_weights / (weight * _ONE)
        return own_tokens + round(tokens - own_tokens + at_boundary + proportional + fixed_mean_tokens / _ONE)

    def _apply_changes(self) -> None:
        """Apply recorded changes. Lazy, because most tenants of an idle fleet leave before the next query."""
        for name in self._changed:
            self._remove(name)
            if (queued := self._queued.get(name)) is not None and queued.waiting:
                self._insert(name, queued.tokens, queued.waiting, self._weights.of(name))
        self._changed.clear()

    def _remove(self, tenant: str) -> None:
        backlog = self._backlogs.pop(tenant, None)
        if backlog is None:
            return
        bucket = self._buckets[backlog.bucket]
        bucket.remove(tenant)
        if not bucket.tenants:
            del self._buckets[backlog.bucket]

    def __repr__(self) -> str:
        return f"<FairWork of {len(self._backlogs)} tenants, {self.tokens} tokens>"


def _bucket(turning_point: float) -> int:
    """Return the index of a turning point's bucket."""
    return math.floor(_BUCKETS_PER_OCTAVE * math.log2(turning_point)) if turning_point > 0 else _SINGLE
