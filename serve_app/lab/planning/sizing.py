"""Sizes by the queueing model: the smallest pools within the limits."""

import math
from dataclasses import dataclass

from serve_app.core.metrics.summary import Slo
from serve_app.lab.planning.fleets import FleetPlan
from serve_app.lab.planning.queueing import UTILISATION_CAP, LengthMix, Performance, PoolModel

# Limits that this many replicas do not meet are not achievable with the engine.
_MAX_REPLICAS = 1_000_000
# A replica below this share of its capacity is practically idle, so more replicas change nothing.
_IDLE = 1e-3
_NO_LIMITS = Slo(ttft_s=None, tpot_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPool:
    """A pool, sized by the model.

    Attributes:
        within_limits: False if no number of replicas meets the limits in this pool alone. It then has the
            smallest number below the utilisation cap. The limits are those of all requests together, so a
            fleet with such a pool may still meet them.
    """

    performance: Performance
    within_limits: bool

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.performance.replicas


def sized_pool(model: PoolModel, rate_per_s: float, slo: Slo) -> SizedPool:
    """Return the smallest pool within the limits, or else the smallest below the utilisation cap."""
    performance = smallest_pool(model, rate_per_s, slo)
    if performance is not None:
        return SizedPool(performance=performance, within_limits=True)
    unlimited = smallest_pool(model, rate_per_s, _NO_LIMITS)
    assert unlimited is not None, "every engine has some capacity"
    return SizedPool(performance=unlimited, within_limits=False)


def smallest_pool(model: PoolModel, rate_per_s: float, slo: Slo) -> Performance | None:
    """Return the smallest pool that meets the P99 limits, according to the model.

    More replicas never raise a latency, so the number is found by doubling and bisection.

    Args:
        rate_per_s: rate of the requests in this pool.
        slo: P99 limits; a limit that is None is ignored.

    Returns:
        None if no number meets them, because even a nearly idle engine is too slow.
    """

    def meets(replicas: int) -> bool:
        return model.performance(rate_per_s, replicas).meets(slo)

    # Fewer replicas exceed the utilisation cap.
    low = max(0, math.ceil(rate_per_s / (UTILISATION_CAP * model.capacity_per_s) - 1e-9) - 1)
    high = low + 1
    while not meets(high):
        if high > _MAX_REPLICAS or rate_per_s / high < _IDLE * model.capacity_per_s:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return model.performance(rate_per_s, high)


def size(plan: FleetPlan, mix: LengthMix, rate_per_s: float, slo: Slo) -> dict[str, SizedPool]:
    """Size every pool of a fleet for its share of the requests."""
    return {
        pool: sized_pool(model, rate_per_s * len(model.mix) / len(mix), slo)
        for pool, model in plan.models(mix).items()
    }
