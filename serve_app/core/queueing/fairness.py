"""Fair shares among the tenants of one priority class.

- `FairShares`: the service of each tenant, and the tenant that is next.
- `FairWork`: the work ahead of a request under fair shares, from sums, so that its cost hardly grows with the
  tenants.

`FairShares`. Every tenant has a *counter*: the service it has received, divided by its weight. Service is
counted in requests or in tokens (prefill + weighted decode). The expected service is charged at dispatch, and
corrected when the engine reports the actual token counts. Rules:

- The tenant with the lowest counter is dispatched first. Tenants within a *quantum* of it, the cost of an
  average request, count as equals, and the policy's score decides among equals. Fairness and EWSJF therefore
  compose: shares are the primary key. Scores are the secondary key, within each tenant and among tenants with
  equal shares.
- In one *turn* each of the equals is served once before any is served twice. So a tenant with a single
  request waits for at most one request of every other tenant.
- A tenant that returns from idle is lifted to the lowest counter of the backlogged tenants: idle time earns
  no credit.
- While no tenant is backlogged, each one that arrives starts at the highest counter of all, so service used
  while nothing was queued is not charged. Otherwise a burst would start by blocking the tenant that had used
  an idle fleet most.

A tenant that cannot be served in its turn, because its requests do not fit, is *owed* service: see
`owed_requests`.

Sources: counters with lift and weights as in VTC (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, algorithm 2); the start after idle as in start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM
1996). Quantum and turns are ours, so that scores retain an effect.

`FairWork`. By the time all queued requests of a tenant are served, every other tenant has received at most
service in proportion to its weight, plus its current request:

    ahead = sum over tenants of min(tokens, own * weight / own weight + tokens / requests)

The first term is the smaller one once `own / own weight` reaches the tenant's *turning point*,
`(tokens - tokens / requests) / weight`. So tenants are grouped in buckets by turning point, eight buckets
per factor of two, with the sums of both terms. Only in the bucket of `own / own weight` each tenant is
evaluated separately. A tenant with a single request has its turning point at 0.

The sums are integers, so that they do not drift.
"""

import bisect
import enum
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.settings_base import INTERNAL, NOT_NEGATIVE, settings
from serve_app.request import MAX_WEIGHT, MIN_WEIGHT, Request, Usage

# Charge of a generated token relative to a prompt token, as in VTC. A generated token occupies a slot of the
# batch for one more iteration; a prompt token shares an iteration with hundreds of others.
_DECODE_WEIGHT = 2.0
# Maximum number of tenants that count as equals: bounds the cost of one decision.
_MAX_EQUALS = 32
# Weight of the newest request in the mean cost.
_MEAN_WEIGHT = 0.02
# Idle tenants whose counters are retained, beyond those that would be lifted anyway.
_MAX_IDLE = 4_096


class FairnessMode(enum.StrEnum):
    """The unit of service."""

    OFF = "off"
    """No shares: one order for all tenants."""
    REQUESTS = "requests"
    """All requests count the same: round-robin."""
    TOKENS = "tokens"
    """Prefill and decode tokens, weighted."""


@settings(block="fairness")
class FairnessSettings:
    """Fair sharing of engine time among tenants."""

    # Unit of service: `tokens` counts weighted tokens, `requests` counts requests, `off` disables shares.
    mode: FairnessMode = FairnessMode.TOKENS
    # Weights of tenants, 0.000001 to 1,000,000; others have 1. A tenant of weight 2 gets twice the service of
    # one of weight 1.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Tenants whose service differs by at most this many average requests count as equals, and the score
    # decides. Lower values are stricter in the short term and make no difference over a minute.
    quantum_requests: Annotated[float, NOT_NEGATIVE, INTERNAL] = 1.0
    # Maximum lead of a tenant over the backlogged tenant with the lowest counter, in average requests.
    # Service beyond it is not charged. Without a maximum, a tenant that is served while the requests of the
    # other do not fit would be blocked until the other has caught up.
    max_lead_requests: Annotated[float, NOT_NEGATIVE, INTERNAL] = 64.0

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                allowed = f"must be from {MIN_WEIGHT:f} to {MAX_WEIGHT:,.0f}"
                raise ValueError(f"fairness.weights of tenant {tenant!r} {allowed}, got {weight}")

    def weight(self, tenant: str) -> float:
        """Return the configured weight of a tenant, 1 by default."""
        return self.weights.get(tenant, 1.0)

    def expected_service(self, estimate: TokenEstimate, cached_tokens: int = 0) -> float:
        """Return the expected service at dispatch to a replica that has `cached_tokens` of the prompt."""
        if self.mode is not FairnessMode.TOKENS:
            return 1.0
        output_tokens = estimate.expected_tokens - estimate.expected_prompt_tokens
        return token_service(estimate.expected_prompt_tokens - cached_tokens, output_tokens)

    def actual_service(self, usage: Usage) -> float:
        """Return the actual service of a request. Cached prompt tokens cost no prefill."""
        if self.mode is not FairnessMode.TOKENS:
            return 1.0
        return token_service(usage.prompt_tokens - usage.cached_tokens, usage.output_tokens)


def token_service(prefilled: int, generated: int) -> float:
    """Return a service in tokens: those computed of a prompt, and weighted ones of an answer."""
    return max(0, prefilled) + _DECODE_WEIGHT * generated


class TenantWeights:
    """The current weights: that of a tenant's API key if it has one, else that of the settings.

    Keys of one tenant should have the same weight. If they differ, that of its latest request counts.
    """

    def __init__(self, settings: FairnessSettings) -> None:
        self._settings = settings
        # The tenant whose requests were observed least recently first.
        self._of_keys: dict[str, float] = {}

    def observe(self, request: Request) -> bool:
        """Learn the weight sent with a request. Return whether it has changed."""
        key, before = request.submission.key, self._of_keys.pop(request.tenant, None)
        if key is None or key.weight is None:
            return before is not None
        self._of_keys[request.tenant] = key.weight
        return before != key.weight

    def forget_idle(self, queued: Collection[Collection[str]]) -> None:
        """Forget the weights of most tenants without queued requests, if they are too many.

        Args:
            queued: the tenants with queued requests, by class.
        """
        if len(self._of_keys) <= _MAX_IDLE + 2 * sum(map(len, queued)):
            return
        idle = [tenant for tenant in self._of_keys if not any(tenant in tenants for tenants in queued)]
        for tenant in idle[: -_MAX_IDLE // 2]:
            del self._of_keys[tenant]

    def of(self, tenant: str) -> float:
        """Return the current weight of a tenant: that of its key, else the configured one."""
        found = self._of_keys.get(tenant) if self._of_keys else None
        return self._settings.weight(tenant) if found is None else found


@dataclass(slots=True, eq=False)
class _Tenant:
    """The account of one tenant.

    Attributes:
        counter: service divided by weight.
        order: order of first arrival; breaks ties.
        served_in: the last turn in which it was served.
        backlogged: whether it has a queued request.
        queued: expected service of its queued requests.
    """

    name: str
    order: int
    counter: float = 0.0
    served_in: int = 0
    backlogged: bool = False
    queued: float = 0.0


class FairShares:
    """The fair shares of the tenants of one priority class."""

    def __init__(self, settings: FairnessSettings, weights: TenantWeights | None = None) -> None:
        self._settings = settings
        self._weights = weights or TenantWeights(settings)
        self._tenants: dict[str, _Tenant] = {}
        # The backlogged tenants, lowest counter first.
        self._backlogged: list[_Tenant] = []
        self._turn = 1
        self._mean_cost = 0.0
        # The highest counter so far, at which all tenants start after a time without any backlog.
        self._highest = 0.0
        self._joined = 0
        # None after a change.
        self._owed: dict[str, float] | None = None

    def on_backlog(self, name: str) -> None:
        """Mark a tenant as backlogged, and lift its counter."""
        tenant = self._tenant(name)
        floor = self._backlogged[0].counter if self._backlogged else self._highest
        tenant.counter = max(tenant.counter, floor)
        tenant.backlogged = True
        bisect.insort(self._backlogged, tenant, key=_by_counter)
        self._owed = None

    def on_idle(self, name: str) -> None:
        """Mark a tenant as idle: its last queued request has left."""
        tenant = self._tenants[name]
        self._remove(tenant)
        tenant.backlogged = False
        tenant.queued = 0.0
        self._owed = None

    def on_immediate_dispatch(self, name: str) -> None:
        """Lift the counter of a tenant whose request is dispatched on arrival, with no backlog."""
        tenant = self._tenant(name)
        tenant.counter = max(tenant.counter, self._highest)

    def charge(self, name: str, cost: float) -> None:
        """Charge a tenant for a dispatched request."""
        tenant = self._tenant(name)
        if tenant.served_in == self._turn:
            self._turn += 1
        tenant.served_in = self._turn
        self._mean_cost += (_MEAN_WEIGHT if self._mean_cost else 1.0) * (cost - self._mean_cost)
        self._owed = None
        before = tenant.counter
        self._add(tenant, cost)
        if self._backlogged:
            lead = self._settings.max_lead_requests * self._mean_cost / self._weights.of(name)
            self._move(tenant, max(before, min(tenant.counter, self._backlogged[0].counter + lead)))

    def correct(self, name: str, difference: float) -> None:
        """Adjust a tenant's service by the difference between actual and charged service."""
        tenant = self._tenant(name)
        is_highest = tenant.counter >= self._highest
        self._add(tenant, difference)
        if is_highest:
            self._highest = tenant.counter

    def order(self, among: Collection[str] | None = None) -> Iterator[list[str]]:
        """Yield the backlogged tenants in the order of service, in groups within which the score decides.

        First the equals not yet served in this turn, then the other equals, then the others one by one. The
        shares must not change during the iteration.

        Args:
            among: limits the tenants other than equals to these; None for all. Equals are always included.
        """
        if not self._backlogged:
            return
        bound = self._backlogged[0].counter + self.quantum
        equals = self._equals(bound)
        unserved = [tenant.name for tenant in equals if tenant.served_in < self._turn]
        if unserved:
            yield unserved
        if len(unserved) < len(equals):
            yield [tenant.name for tenant in equals if tenant.served_in >= self._turn]
        if among is None:
            others: Iterator[_Tenant] = itertools.islice(self._backlogged, len(equals), None)
        else:
            others = iter(sorted({self._tenants[name] for name in among}.difference(equals), key=_by_counter))
        for tenant in others:
            yield [tenant.name]

    def on_queued(self, name: str, service: float) -> None:
        """Count the expected service of a request that joins the queue, or leaves it (negative)."""
        self._tenants[name].queued += service
        self._owed = None

    def queued(self, name: str) -> float:
        """Return the expected service of a tenant's queued requests."""
        tenant = self._tenants.get(name)
        return 0.0 if tenant is None else tenant.queued

    def on_weight(self) -> None:
        """Note that the weight of a tenant has changed."""
        self._owed = None

    def owed_requests(self) -> dict[str, float]:
        """Return how many average requests tenants are owed now, for those that are owed any.

        A tenant behind all others is owed its distance to the next one. A tenant uses less than its share if
        it would be behind the mean of the queued work even after all of its own, and is owed the difference.
        """
        if self._owed is None:
            self._owed = dict(self._find_owed())
        return self._owed

    def _find_owed(self) -> Iterator[tuple[str, float]]:
        if len(self._backlogged) < 2 or not self._mean_cost > 0:
            return
        queued = sum([each.queued for each in self._backlogged])
        work = sum([each.queued * each.counter for each in self._backlogged])
        mean, (first, second) = work / queued if queued > 0 else 0.0, self._backlogged[:2]
        for tenant in self._backlogged:
            if tenant is not first and tenant.counter >= mean:
                return
            weight = self._weights.of(tenant.name)
            owed = (mean - tenant.counter) * weight - tenant.queued
            if tenant is first:
                owed = max(owed, (second.counter - tenant.counter) * weight)
            if owed > 0:
                yield tenant.name, owed / self._mean_cost

    def counters(self) -> dict[str, float]:
        """Return service divided by weight, by tenant."""
        return {tenant.name: tenant.counter for tenant in self._tenants.values()}

    def backlogged(self) -> Iterator[tuple[str, float, float]]:
        """Yield each backlogged tenant, its counter above the lowest one, and its weight."""
        for tenant in self._backlogged:
            yield tenant.name, tenant.counter - self._backlogged[0].counter, self._weights.of(tenant.name)

    @property
    def quantum(self) -> float:
        """The difference between counters up to which tenants count as equals."""
        return self._settings.quantum_requests * self._mean_cost

    def _equals(self, bound: float) -> list[_Tenant]:
        limit = min(_MAX_EQUALS, len(self._backlogged))
        count = 1
        while count < limit and self._backlogged[count].counter < bound:
            count += 1
        return self._backlogged[:count]

    def _add(self, tenant: _Tenant, cost: float) -> None:
        self._move(tenant, max(0.0, tenant.counter + cost / self._weights.of(tenant.name)))
        self._highest = max(self._highest, tenant.counter)

    def _move(self, tenant: _Tenant, counter: float) -> None:
        if counter == tenant.counter:
            return
        if tenant.backlogged:
            self._remove(tenant)
        tenant.counter = counter
        if tenant.backlogged:
            bisect.insort(self._backlogged, tenant, key=_by_counter)
            self._owed = None

    def _remove(self, tenant: _Tenant) -> None:
        index = bisect.bisect_left(self._backlogged, _by_counter(tenant), key=_by_counter)
        assert self._backlogged[index] is tenant
        del self._backlogged[index]

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) > _MAX_IDLE + 2 * len(self._backlogged):
                self._drop_idle()
            self._joined += 1
            tenant = self._tenants[name] = _Tenant(name, self._joined)
        return tenant

    def _drop_idle(self) -> None:
        """Remove idle tenants that would be lifted on their return, then those with the lowest counters."""
        floor = self._backlogged[0].counter if self._backlogged else self._highest
        idle = sorted((each for each in self._tenants.values() if not each.backlogged), key=_by_counter)
        for number, tenant in enumerate(idle):
            if tenant.counter <= floor or number < len(idle) - _MAX_IDLE // 2:
                del self._tenants[tenant.name]

    def __repr__(self) -> str:
        return (
            f"<FairShares backlogged={len(self._backlogged)} tenants={len(self._tenants)} turn={self._turn}>"
        )


def _by_counter(tenant: _Tenant) -> tuple[float, int]:
    return (tenant.counter, tenant.order)


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
        """Record that a tenant's queued tokens have changed by `tokens`, or that its weight has changed."""
        self.tokens += tokens
        queued = self._queued.get(tenant)
        if tenant in self._backlogs or (queued is not None and queued.waiting):
            self._changed.add(tenant)
        else:
            # It has left before a query.
            self._changed.discard(tenant)

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
