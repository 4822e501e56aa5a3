"""Sizes by the queueing model: the smallest pools within the limits, and the terms of the closed forms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.metrics.slo import Slo
from serve_app.planning.model.closed_form import ClosedForm, work_share
from serve_app.planning.model.length_mix import LengthMix
from serve_app.planning.model.performance import UTILISATION_CAP, Performance
from serve_app.planning.model.queueing import PoolModel
from serve_app.planning.sizing.costs import CostTable
from serve_app.planning.sizing.fleets import FleetPlan

# Limits that this many replicas do not meet are out of reach for the engine itself.
_MOST_REPLICAS = 1_000_000
# A replica below this share of its capacity is practically idle: more replicas change nothing.
_IDLE = 1e-3
_NO_LIMITS = Slo(ttft_s=None, tpot_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPool:
    """A pool, sized by the model.

    Attributes:
        within_limits: False when no number of replicas meets the limits in this pool alone. It then has the
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
    """The smallest pool within the limits, or else the smallest below the utilisation cap."""
    performance = smallest_pool(model, rate_per_s, slo)
    if performance is not None:
        return SizedPool(performance=performance, within_limits=True)
    unlimited = smallest_pool(model, rate_per_s, _NO_LIMITS)
    assert unlimited is not None, "every engine has some capacity"
    return SizedPool(performance=unlimited, within_limits=False)


def smallest_pool(
    model: PoolModel, rate_per_s: float, slo: Slo, *, utilisation_cap: float = UTILISATION_CAP
) -> Performance | None:
    """The smallest pool that meets the P99 limits, by the model.

    More replicas never raise a latency, so the number is found by doubling and bisection.

    Args:
        rate_per_s: of the requests in this pool.
        slo: P99 limits; a limit that is None is ignored.

    Returns:
        None when no number meets them, because even a nearly idle engine is too slow.
    """
    if not rate_per_s > 0:
        raise ValueError(f"a pool is sized for a positive rate, got {rate_per_s}")

    def meets(replicas: int) -> bool:
        return model.performance(rate_per_s, replicas).meets(slo, utilisation_cap)

    # Fewer replicas exceed the utilisation cap.
    low = max(0, math.ceil(rate_per_s / (utilisation_cap * model.capacity_per_s) - 1e-9) - 1)
    high = low + 1
    while not meets(high):
        if high > _MOST_REPLICAS or rate_per_s / high < _IDLE * model.capacity_per_s:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return model.performance(rate_per_s, high)


def sustainable_rate_per_s(model: PoolModel, slo: Slo) -> float:
    """The largest rate of one replica, in a pool so large that no request waits for a batch slot.

    The utilisation is below the cap, and the P99 of TTFT and TPOT are within the limits. When even an idle
    engine is too slow for them, only the cap counts.
    """

    def holds(rate_per_s: float) -> bool:
        point = model.at_rate(rate_per_s)
        return (
            point is not None
            and (slo.ttft_s is None or point.first_token_s <= slo.ttft_s)
            and (slo.tpot_s is None or point.tpot_s <= slo.tpot_s)
        )

    low, high = 0.0, UTILISATION_CAP * model.capacity_per_s
    if holds(high) or not holds(_IDLE * high):
        return high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def size(plan: FleetPlan, mix: LengthMix, rate_per_s: float, slo: Slo) -> dict[str, SizedPool]:
    """Size every pool of a fleet for its share of the requests."""
    return {
        pool: sized_pool(model, rate_per_s * len(model.mix) / len(mix), slo)
        for pool, model in plan.models(mix).items()
    }


def closed_form(
    undivided: FleetPlan, divided: FleetPlan, mix: LengthMix, slo: Slo, costs: CostTable
) -> ClosedForm:
    """The terms of the closed forms, from the sustainable rates of the model.

    As in the papers, the work of a request is its iterations on the undivided fleet. Paces are per dollar, so
    that pools of different GPUs can be compared.
    """
    (whole,) = undivided.models(mix).values()
    parts: Mapping[str, PoolModel] = divided.models(mix)
    (undivided_plan,) = undivided.pools.values()
    alpha = len(parts["short"].mix) / len(mix)
    work_of_short = whole.mean_iterations(parts["short"].mix)
    work_of_all = whole.mean_iterations(mix)

    def pace(model: PoolModel, profile: str) -> float:
        return sustainable_rate_per_s(model, slo) / costs.usd_per_hour(profile)

    base = pace(whole, undivided_plan.profile) * work_of_all
    paces = {
        pool: pace(model, divided.pools[pool].profile) * whole.mean_iterations(model.mix)
        for pool, model in parts.items()
    }
    return ClosedForm(
        short_request_ratio=alpha,
        short_work_ratio=work_share(alpha, work_of_short, work_of_all),
        rho_short=paces["short"] / base,
        rho_long=paces["long"] / base,
    )
