"""Whose turn is it? Fair shares among the tenants of one priority class, across all length queues.

Every tenant has a *counter*: the service it has had, over its weight. Service is counted in requests or in
tokens (prefill + weighted decode), is charged at dispatch as expected, and corrected when the engine has told
the real figures. Rules:

- The tenant with the lowest counter is served first. Those within a *quantum* of it, the cost of an average
  request, count as equals: a smaller difference is no unfairness, and among equals the policy's score
  decides. This is how fairness and EWSJF compose: shares are the first order, shortness and urgency the
  second, inside each tenant always and among tenants wherever their shares are even.
- Equals take turns. In one *round* each of them is served once before any of them is served twice, so a
  tenant
  with a single request waits for one request of every other tenant at the most.
- A tenant that comes back from idle is lifted to the lowest counter of those who wait. It has no claim on the
  time when it wanted nothing.
- Where nobody waits, whoever comes next begins at the highest counter there is, and so does everybody after
  it: nobody owes for what it had when nobody had to wait. Otherwise a burst would begin with the tenant that
  had used an idle fleet most being locked out until all others had caught up.

Counters as in VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2 with its
counter lift and weights); the new beginning as in start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996);
quantum and rounds are ours, so that scores keep a say.
"""

import bisect
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from serve_app.request import Usage
from serve_app.routing.estimation.estimate import TokenEstimate
from serve_app.settings_base import NOT_NEGATIVE, settings

# Tenants that are weighed against each other at once: a bound on the cost of one decision.
_MOST_EQUALS = 32
# Weight of the newest request in the mean cost.
_MEAN_WEIGHT = 0.02
# Tenants without any request that are remembered, beyond those whose counter still says something.
_REMEMBERED = 4_096


class FairnessMode(enum.StrEnum):
    """In what service is counted."""

    OFF = "off"
    """Not at all: one order for all tenants."""
    REQUESTS = "requests"
    """Every request counts the same: round-robin."""
    TOKENS = "tokens"
    """Prefill and decode tokens, weighted."""


@settings(block="fairness")
class FairnessSettings:
    """How the engines' time is shared out among tenants."""

    mode: FairnessMode = FairnessMode.TOKENS
    # Shares of the tenants that are not 1: a tenant of weight 2 gets twice the service of one of weight 1.
    weights: Mapping[str, float] = field(default_factory=dict)
    # A generated token takes a sequence's place in one more iteration, a prompt token shares one with
    # hundreds of others. VTC charges 1 and 2.
    prefill_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    decode_weight: Annotated[float, NOT_NEGATIVE] = 2.0
    # Differences up to the cost of so many average requests leave the choice to the score. Less is stricter
    # from one request to the next and changes nothing over a minute.
    quantum_requests: Annotated[float, NOT_NEGATIVE] = 1.0
    # How far a tenant may get ahead of one that waits, in average requests, by taking what that one could not
    # (its requests were too long for the room there was). What goes beyond is not owed: it would be locked
    # out for as long as it takes the other to catch up.
    max_lead_requests: Annotated[float, NOT_NEGATIVE] = 64.0

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"fairness.weights of tenant {tenant!r} must be positive, got {weight}")
        if self.prefill_weight + self.decode_weight <= 0:
            raise ValueError(
                "fairness.prefill_weight and decode_weight are both 0: service must cost something"
            )

    def weight(self, tenant: str) -> float:
        """Share of a tenant among the others."""
        return self.weights.get(tenant, 1.0)

    def expected_cost(self, estimate: TokenEstimate, cached_tokens: int = 0) -> float:
        """What to charge for a request when it is dispatched to a replica that has so much of it cached."""
        if self.mode is not FairnessMode.TOKENS:
            return 1.0
        output_tokens = estimate.expected_tokens - estimate.expected_prompt_tokens
        prefilled = max(0, estimate.expected_prompt_tokens - cached_tokens)
        return self.prefill_weight * prefilled + self.decode_weight * output_tokens

    def real_cost(self, usage: Usage) -> float:
        """What it has cost in the end. Cached prompt tokens cost no prefill."""
        if self.mode is not FairnessMode.TOKENS:
            return 1.0
        prefilled = max(0, usage.prompt_tokens - usage.cached_tokens)
        return self.prefill_weight * prefilled + self.decode_weight * usage.output_tokens


@dataclass(slots=True, eq=False)
class _Tenant:
    """Books of one tenant.

    Attributes:
        counter: service over weight.
        served_in: the last round in which it was served.
        waits: it has a request in the queue.
    """

    name: str
    order: int
    counter: float = 0.0
    served_in: int = 0
    waits: bool = False

    @property
    def place(self) -> tuple[float, int]:
        """Position among those who wait."""
        return (self.counter, self.order)


class FairShares:
    """The tenants of one priority class."""

    def __init__(self, settings: FairnessSettings) -> None:
        self._settings = settings
        self._tenants: dict[str, _Tenant] = {}
        # Those who wait, the lowest counter first.
        self._waiting: list[_Tenant] = []
        self._round = 1
        self._mean_cost = 0.0
        # The highest counter there ever was: where all begin again after a moment in which nobody waited.
        self._highest = 0.0
        self._joined = 0

    def on_arrival(self, name: str) -> None:
        """The first of a tenant's requests waits."""
        tenant = self._tenant(name)
        floor = self._waiting[0].counter if self._waiting else self._highest
        tenant.counter = max(tenant.counter, floor)
        tenant.waits = True
        bisect.insort(self._waiting, tenant, key=_place)

    def went(self, name: str) -> None:
        """None of a tenant's requests waits any more."""
        tenant = self._tenants[name]
        self._take_out(tenant)
        tenant.waits = False

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
            lead = self._settings.max_lead_requests * self._mean_cost / self._settings.weight(name)
            self._move(tenant, max(before, min(tenant.counter, self._waiting[0].counter + lead)))

    def correct(self, name: str, by: float) -> None:
        """The cost of a request turned out to be more, or less, than it was charged."""
        tenant = self._tenant(name)
        is_highest = tenant.counter >= self._highest
        self._add(tenant, by)
        if is_highest:
            self._highest = tenant.counter

    def turns(self) -> Iterator[list[str]]:
        """Who may go, in groups of equals: those whose turn it is, then the other equals, then one by one."""
        if not self._waiting:
            return
        bound = self._waiting[0].counter + self._settings.quantum_requests * self._mean_cost
        equals = self._equals(bound)
        fresh = [tenant.name for tenant in equals if tenant.served_in < self._round]
        if fresh:
            yield fresh
        if len(fresh) < len(equals):
            yield [tenant.name for tenant in equals if tenant.served_in >= self._round]
        for tenant in self._waiting[len(equals) :]:
            yield [tenant.name]

    def behind_requests(self, name: str) -> float:
        """How many average requests a waiting tenant would have to be served to be level with the next one.

        0 for all but the one that is furthest behind.
        """
        if len(self._waiting) < 2 or self._waiting[0].name != name or not self._mean_cost > 0:
            return 0.0
        behind = self._waiting[1].counter - self._waiting[0].counter
        return behind * self._settings.weight(name) / self._mean_cost

    def counters(self) -> dict[str, float]:
        """Service over weight, by tenant, of all that are remembered."""
        return {tenant.name: tenant.counter for tenant in self._tenants.values()}

    def _equals(self, bound: float) -> list[_Tenant]:
        most = min(_MOST_EQUALS, len(self._waiting))
        count = 1
        while count < most and self._waiting[count].counter < bound:
            count += 1
        return self._waiting[:count]

    def _add(self, tenant: _Tenant, cost: float) -> None:
        self._move(tenant, max(0.0, tenant.counter + cost / self._settings.weight(tenant.name)))
        self._highest = max(self._highest, tenant.counter)

    def _move(self, tenant: _Tenant, counter: float) -> None:
        if counter == tenant.counter:
            return
        if tenant.waits:
            self._take_out(tenant)
        tenant.counter = counter
        if tenant.waits:
            bisect.insort(self._waiting, tenant, key=_place)

    def _take_out(self, tenant: _Tenant) -> None:
        place = bisect.bisect_left(self._waiting, tenant.place, key=_place)
        assert self._waiting[place] is tenant
        del self._waiting[place]

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) > _REMEMBERED + 2 * len(self._waiting):
                self._forget()
            self._joined += 1
            tenant = self._tenants[name] = _Tenant(name, self._joined)
        return tenant

    def _forget(self) -> None:
        """Drop whoever would be lifted anyway when it comes back; then whoever owes least."""
        floor = self._waiting[0].counter if self._waiting else self._highest
        idle = sorted((one for one in self._tenants.values() if not one.waits), key=_place)
        for number, tenant in enumerate(idle):
            if tenant.counter <= floor or number < len(idle) - _REMEMBERED // 2:
                del self._tenants[tenant.name]

    def __repr__(self) -> str:
        return (
            f"<FairShares waiting={len(self._waiting)} remembered={len(self._tenants)} round={self._round}>"
        )


def _place(tenant: _Tenant) -> tuple[float, int]:
    return tenant.place
