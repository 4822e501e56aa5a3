"""Fair shares among the tenants of one priority class, and the work ahead of a request under them.

Every tenant has a *counter*: the service that it has received, divided by its weight. Service is counted in
requests or in tokens (prefill + weighted decode). It is charged at dispatch as expected, and corrected when
the engine reports the actual figures. Rules:

- The tenant with the lowest normalised service is dispatched first. Tenants within a *quantum* of it, the
  cost of an average request, count as equals, and among equals the policy's score decides. So fairness and
  EWSJF compose: shares are the first order, scores the second, inside each tenant and among tenants with even
      shares.
- In one *round* each of the equals is served once before any is served twice. So a tenant with a single
  request waits for at most one request of every other tenant.
- A tenant that returns from idle is lifted to the lowest counter of the backlogged tenants: idling earns no
  claim.
- While no tenant is backlogged, each one that arrives begins at the highest counter of all. So service taken
  while no one queued is not charged. Otherwise a burst would begin by locking out the tenant that had used an
  idle fleet most.

Sources: counters with lift and weights as in VTC (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, algorithm 2); the start after idle as in start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM
1996). Quantum and rounds are ours, so that scores keep an effect.
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
from serve_app.request import Request, Usage

# Charge of a generated token, where one of a prompt is 1, as in VTC. It needs a slot of the batch for one
# more iteration; a prompt token shares an iteration with hundreds of others.
_DECODE_WEIGHT = 2.0
# Most tenants that count as equals at once: a bound on the cost of one decision.
_MOST_EQUALS = 32
# Weight of the newest request in the mean cost.
_MEAN_WEIGHT = 0.02
# Idle tenants whose counters are kept, beyond those that would be lifted anyway.
_KEPT_IDLE = 4_096


class FairnessMode(enum.StrEnum):
    """The unit of service."""

    OFF = "off"
    """No shares: one order for all tenants."""
    REQUESTS = "requests"
    """Every request counts the same: round-robin."""
    TOKENS = "tokens"
    """Prefill and decode tokens, weighted."""


@settings(block="fairness")
class FairnessSettings:
    """How the engines' time is shared among tenants."""

    # `tokens` counts weighted tokens, `requests` counts requests, `off` keeps one order for all tenants.
    mode: FairnessMode = FairnessMode.TOKENS
    # Weights of tenants, 1 for those not named: a tenant of weight 2 gets twice the service of one of weight
    # 1.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Differences up to the cost of so many average requests leave the choice to the score. Lower is stricter
    # from one request to the next, and makes no difference over a minute.
    quantum_requests: Annotated[float, NOT_NEGATIVE, INTERNAL] = 1.0
    # How far a tenant may get ahead of a waiting one, in average requests, while the other's requests are too
    # long for the free capacity. What goes beyond is not charged, or it would be locked out until the other
    # has caught up.
    max_lead_requests: Annotated[float, NOT_NEGATIVE, INTERNAL] = 64.0

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"fairness.weights of tenant {tenant!r} must be positive, got {weight}")

    def weight(self, tenant: str) -> float:
        """Weight of a tenant."""
        return self.weights.get(tenant, 1.0)

    def expected_cost(self, estimate: TokenEstimate, cached_tokens: int = 0) -> float:
        """Service to charge for a request at its dispatch to a replica that has so much of it cached."""
        if self.mode is not FairnessMode.TOKENS:
            return 1.0
        output_tokens = estimate.expected_tokens - estimate.expected_prompt_tokens
        prefilled = max(0, estimate.expected_prompt_tokens - cached_tokens)
        return prefilled + _DECODE_WEIGHT * output_tokens

    def real_cost(self, usage: Usage) -> float:
        """Actual service of a request. Cached prompt tokens cost no prefill."""
        if self.mode is not FairnessMode.TOKENS:
            return 1.0
        prefilled = max(0, usage.prompt_tokens - usage.cached_tokens)
        return prefilled + _DECODE_WEIGHT * usage.output_tokens


class TenantWeights:
    """The weights in force: of a tenant's API key where that has one, else of the settings.

    Keys of one tenant should have one weight; where they differ, that of its latest request counts.
    """

    def __init__(self, settings: FairnessSettings) -> None:
        self._settings = settings
        self._of_keys: dict[str, float] = {}

    def observe(self, request: Request) -> bool:
        """Learn the weight that a request brings; whether it is another than before."""
        key, before = request.submission.key, self._of_keys.get(request.tenant)
        if key is None or key.weight is None:
            if before is None:
                return False
            del self._of_keys[request.tenant]
            return True
        self._of_keys[request.tenant] = key.weight
        return before != key.weight

    def of(self, tenant: str) -> float:
        """Weight of a tenant."""
        found = self._of_keys.get(tenant) if self._of_keys else None
        return self._settings.weight(tenant) if found is None else found


@dataclass(slots=True, eq=False)
class _Tenant:
    """The account of one tenant.

    Attributes:
        counter: service over weight.
        order: order of first arrival; breaks ties.
        served_in: the last round in which it was served.
        backlogged: it has a request in the queue.
    """

    name: str
    order: int
    counter: float = 0.0
    served_in: int = 0
    backlogged: bool = False


class FairShares:
    """The tenants of one priority class."""

    def __init__(self, settings: FairnessSettings, weights: TenantWeights | None = None) -> None:
        self._settings = settings
        self._weights = weights or TenantWeights(settings)
        self._tenants: dict[str, _Tenant] = {}
        # The backlogged tenants, the lowest counter first.
        self._waiting: list[_Tenant] = []
        self._round = 1
        self._mean_cost = 0.0
        # The highest counter so far, at which all begin after a time without any backlog.
        self._highest = 0.0
        self._joined = 0

    def on_backlog(self, name: str) -> None:
        """A tenant without waiting requests has one now."""
        tenant = self._tenant(name)
        floor = self._waiting[0].counter if self._waiting else self._highest
        tenant.counter = max(tenant.counter, floor)
        tenant.backlogged = True
        bisect.insort(self._waiting, tenant, key=_by_counter)

    def on_idle(self, name: str) -> None:
        """A tenant has no waiting requests any more."""
        tenant = self._tenants[name]
        self._take_out(tenant)
        tenant.backlogged = False

    def on_pass(self, name: str) -> None:
        """A request of a tenant comes and goes at once, while no tenant has any waiting."""
        tenant = self._tenant(name)
        tenant.counter = max(tenant.counter, self._highest)

    def charge(self, name: str, cost: float) -> None:
        """A request of a tenant is dispatched."""
        tenant = self._tenant(name)
        if tenant.served_in == self._round:
            self._round += 1
        tenant.served_in = self._round
        self._mean_cost += (_MEAN_WEIGHT if self._mean_cost else 1.0) * (cost - self._mean_cost)
        before = tenant.counter
        self._add(tenant, cost)
        if self._waiting:
            lead = self._settings.max_lead_requests * self._mean_cost / self._weights.of(name)
            self._move(tenant, max(before, min(tenant.counter, self._waiting[0].counter + lead)))

    def correct(self, name: str, by: float) -> None:
        """The service of a request was `by` more than charged, or less if negative."""
        tenant = self._tenant(name)
        is_highest = tenant.counter >= self._highest
        self._add(tenant, by)
        if is_highest:
            self._highest = tenant.counter

    def order(self, among: Collection[str] | None = None) -> Iterator[list[str]]:
        """Tenants in the order of service, in groups within which the score decides.

        First the equals not yet served in this round, then the other equals, then the others one by one.
        Nothing may change while the caller iterates.

        Args:
            among: of the others, only these waiting tenants are asked for; None for all. Equals are always
                all given.
        """
        if not self._waiting:
            return
        bound = self._waiting[0].counter + self.quantum
        equals = self._equals(bound)
        fresh = [tenant.name for tenant in equals if tenant.served_in < self._round]
        if fresh:
            yield fresh
        if len(fresh) < len(equals):
            yield [tenant.name for tenant in equals if tenant.served_in >= self._round]
        if among is None:
            others: Iterator[_Tenant] = itertools.islice(self._waiting, len(equals), None)
        else:
            others = iter(sorted({self._tenants[name] for name in among}.difference(equals), key=_by_counter))
        for tenant in others:
            yield [tenant.name]

    def behind_requests(self, name: str) -> float:
        """Average requests to serve before a waiting tenant is level with the next one.

        0 for all but the tenant that is furthest behind.
        """
        if len(self._waiting) < 2 or self._waiting[0].name != name:
            return 0.0
        return self.most_behind()[1]

    def most_behind(self) -> tuple[str, float]:
        """The tenant that is furthest behind, and by how many average requests; no name where none is."""
        if len(self._waiting) < 2 or not self._mean_cost > 0:
            return "", 0.0
        name, behind = self._waiting[0].name, self._waiting[1].counter - self._waiting[0].counter
        return name, behind * self._weights.of(name) / self._mean_cost

    def counters(self) -> dict[str, float]:
        """Service over weight, by tenant."""
        return {tenant.name: tenant.counter for tenant in self._tenants.values()}

    def backlogged(self) -> Iterator[tuple[str, float, float]]:
        """Each tenant with waiting requests, its service over weight beyond the lowest, and its weight."""
        for tenant in self._waiting:
            yield tenant.name, tenant.counter - self._waiting[0].counter, self._weights.of(tenant.name)

    @property
    def quantum(self) -> float:
        """The difference of service over weight up to which tenants count as equals."""
        return self._settings.quantum_requests * self._mean_cost

    def _equals(self, bound: float) -> list[_Tenant]:
        most = min(_MOST_EQUALS, len(self._waiting))
        count = 1
        while count < most and self._waiting[count].counter < bound:
            count += 1
        return self._waiting[:count]

    def _add(self, tenant: _Tenant, cost: float) -> None:
        self._move(tenant, max(0.0, tenant.counter + cost / self._weights.of(tenant.name)))
        self._highest = max(self._highest, tenant.counter)

    def _move(self, tenant: _Tenant, counter: float) -> None:
        if counter == tenant.counter:
            return
        if tenant.backlogged:
            self._take_out(tenant)
        tenant.counter = counter
        if tenant.backlogged:
            bisect.insort(self._waiting, tenant, key=_by_counter)

    def _take_out(self, tenant: _Tenant) -> None:
        index = bisect.bisect_left(self._waiting, _by_counter(tenant), key=_by_counter)
        assert self._waiting[index] is tenant
        del self._waiting[index]

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) > _KEPT_IDLE + 2 * len(self._waiting):
                self._drop_idle()
            self._joined += 1
            tenant = self._tenants[name] = _Tenant(name, self._joined)
        return tenant

    def _drop_idle(self) -> None:
        """Drop idle tenants that would be lifted on their return, and then those with the lowest counters."""
        floor = self._waiting[0].counter if self._waiting else self._highest
        idle = sorted((one for one in self._tenants.values() if not one.backlogged), key=_by_counter)
        for number, tenant in enumerate(idle):
            if tenant.counter <= floor or number < len(idle) - _KEPT_IDLE // 2:
                del self._tenants[tenant.name]

    def __repr__(self) -> str:
        return f"<FairShares waiting={len(self._waiting)} tenants={len(self._tenants)} round={self._round}>"


def _by_counter(tenant: _Tenant) -> tuple[float, int]:
    return (tenant.counter, tenant.order)


# The work ahead of a request under fair shares, from sums, so that its cost hardly grows with the tenants.
#
# While all that a tenant has waiting is served, every other tenant is served as much in proportion to its
# weight, and the request that it is at:
#
#     ahead = sum over tenants of min(tokens, own * weight / own weight + tokens / waiting)
#
# The first term is the smaller one as soon as `own / own weight` reaches the tenant's *turning point*,
# `(tokens - tokens / waiting) / weight`. So tenants are kept in buckets by turning point, eight to the
# octave, with the sums of both terms. Only in the bucket of `own / own weight` itself each tenant is looked
# at. One with a single request has its turning point at 0.
#
# Sums are of whole numbers, so that they do not drift.


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
