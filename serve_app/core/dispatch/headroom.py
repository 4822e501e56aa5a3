"""Tenant headroom: the last part of a replica's KV cache, kept from tenants that hold more than their share.

Fair shares decide which tenant is next, but a request holds its KV cache for its whole answer. If a few
tenants fill the cache of every replica, a request of any other waits until one of their answers ends, even if
it is the next in order. So a tenant that holds more than its share of a pool gets no capacity from the last
part of a replica, as long as others need it.

The size follows the *light* tenants, those that hold at most half of their share. Their requests arrive at
random and take the reserved part. It is free again as soon as answers end, because no heavy tenant gets it.
With `r`, the share of light tenants in the tokens of a pool, the number of light requests that find no room
falls by `r` with each request that fits into the reserved part:

    P(light request waits) = r ** n  <=  1 %       n = log(0.01) / log(r)

The reserved part is `n` mean requests of light tenants, on all replicas of the pool together; on each at
least one, and at most a tenth of the cache. It is 0 if tenants are alike, since none is light, and if no
other tenant has sent a request lately.

The price: heavy tenants wait for that part.

Source: trunk reservation of loss networks (Kelly, "Loss Networks", 1991); the geometric tail assumes Poisson
arrivals.
"""

import math
from collections import OrderedDict

from serve_app.core.queueing.fairness import TenantWeights
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger

# Share of its fair share up to which a tenant is light.
_LIGHT = 0.5
# Probability that a light request finds the reserved part in use, and the largest part of a replica's cache.
_MISSES, _MAX_RATIO = 0.01, 0.1
# Time after which a tenant without requests no longer has a share.
_ACTIVE_S = 60.0
# Weight of a request in the means: about the last two hundred.
_WEIGHT = 0.005
# Below this share of all tokens, light tenants get no part.
_MIN_LIGHT = 0.005


class _PoolUse:
    """Tokens that each tenant holds in one pool, and its mean request."""

    __slots__ = ("by_tenant", "light_mean", "light_tokens", "mean_tokens", "tokens")

    def __init__(self) -> None:
        self.by_tenant: dict[str, int] = {}
        self.tokens = 0
        self.mean_tokens = self.light_tokens = self.light_mean = 0.0


class TenantHeadroom:
    """Counts what tenants hold, and determines what must remain free after a request.

    Attributes:
        is_enabled: whether anything is kept: under fair shares and a policy that promotes.
    """

    def __init__(self, ledger: ReplicaLedger, weights: TenantWeights, *, is_enabled: bool) -> None:
        self._ledger = ledger
        self.is_enabled = is_enabled
        self._weights = weights
        self._pools: dict[str, _PoolUse] = {}
        # The tenants with recent requests, by the time of the last one.
        self._active: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._active_weight = 0.0

    def __repr__(self) -> str:
        return f"<TenantHeadroom of {len(self._active)} tenants>"

    def on_hold(self, scheduled: ScheduledRequest, pool: str, now: float) -> None:
        """Count a request that a replica of the pool holds from now on."""
        tenant, tokens = scheduled.request.tenant, scheduled.hold.tokens
        self._touch(tenant, now)
        use = self._pools.get(pool)
        if use is None:
            use = self._pools[pool] = _PoolUse()
        held = use.by_tenant.get(tenant, 0)
        is_light = held + tokens <= _LIGHT * self._share(tenant) * use.tokens
        use.by_tenant[tenant] = held + tokens
        use.tokens += tokens
        use.mean_tokens += _WEIGHT * (tokens - use.mean_tokens)
        use.light_tokens += _WEIGHT * (tokens * is_light - use.light_tokens)
        if is_light:
            use.light_mean += (_WEIGHT if use.light_mean else 1.0) * (tokens - use.light_mean)

    def on_release(self, scheduled: ScheduledRequest) -> None:
        """Count a request that is no longer held."""
        tenant, tokens, kv_use = scheduled.request.tenant, scheduled.hold.tokens, scheduled.hold.use
        assert kv_use is not None
        use = self._pools[kv_use.pool]
        use.tokens -= tokens
        # A request may need no tokens, so a tenant without any may still have requests.
        left = use.by_tenant.pop(tenant, 0) - tokens
        if left:
            use.by_tenant[tenant] = left

    def tokens(self, scheduled: ScheduledRequest, pool: str) -> int:
        """Return the tokens that a request must leave free on its replica; 0 within its tenant's share."""
        use = self._pools.get(pool)
        if use is None or not use.light_mean or not self.is_enabled:
            return 0
        tenant = scheduled.request.tenant
        if use.by_tenant.get(tenant, 0) <= self._share(tenant) * use.tokens:
            return 0
        return self._kept(use, pool)

    def _kept(self, use: _PoolUse, pool: str) -> int:
        light = use.light_tokens / use.mean_tokens
        if light < _MIN_LIGHT:
            return 0
        requests = math.log(_MISSES) / math.log(min(light, 0.99))
        replicas, budget = len(self._ledger.of_pool(pool)), self._ledger.smallest_kv_budget(pool)
        return int(min(_MAX_RATIO * budget, use.light_mean * max(1.0, requests / max(1, replicas))))

    def _share(self, tenant: str) -> float:
        return self._weights.of(tenant) / max(self._active_weight, self._weights.of(tenant))

    def _touch(self, tenant: str, now: float) -> None:
        _, weight = self._active.pop(tenant, (0.0, 0.0))
        self._active_weight += self._weights.of(tenant) - weight
        self._active[tenant] = now, self._weights.of(tenant)
        while (first := next(iter(self._active))) != tenant and self._active[first][0] < now - _ACTIVE_S:
            self._active_weight -= self._active.pop(first)[1]
