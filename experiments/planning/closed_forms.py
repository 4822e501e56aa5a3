"""Closed forms of the saving by a split fleet, and their terms from the queueing model.

The closed forms give the saving of a split fleet, each exact under its assumption. One pool of instances
serves all requests. After the split, requests up to `B_short` have separate instances, which serve them `rho`
times as fast. The instances needed are work divided by pace, so the saving is:

    share of requests   alpha * (1 - 1/rho)                 token-budget pool routing, arXiv 2604.09613
    share of work       w_s   * (1 - 1/rho)                 with w_s = alpha * E[S | short] / E[S]
    both pools changed  w_s   * (1 - 1/rho_short) + (1 - w_s) * (1 - 1/rho_long)

The first form assigns every request the same work. Short requests are less work than the mean, so it
overestimates the saving; it is exact only if E[S | short] = E[S].

The second counts instances. With S the instance time of a request on the undivided fleet, N = rate * E[S].
Short requests occupy the share w_s of it, and need 1/rho of that after the split.

The third allows different instances in the long pool as well. Without short requests in its batches, a long
pool may be slower; `rho_long` is then below 1.

All three ignore the price of two pools in a small fleet: each pool needs a reserve against fluctuations, and
is rounded up to whole instances.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.core.metrics.summary import Slo
from serve_app.lab.planning.queueing import UTILISATION_CAP, CostTable, FleetPlan, LengthMix, PoolModel

# A replica below this share of its capacity is practically idle.
_IDLE = 1e-3


def saving(short_ratio: float, rho: float) -> float:
    """Return the share of instances that is saved, `share * (1 - 1/rho)`.

    Args:
        short_ratio: share of the short requests: alpha of all requests (the papers' form), or w_s of all work
            (the exact form if the long pool's instances do not change).
        rho: pace of short requests on the short pool's instances over that on the undivided fleet's. The
            papers use the throughputs of whole instances.

    Raises:
        ValueError: the share is outside 0 to 1, or `rho` is not positive.
    """
    _check_share(short_ratio)
    if not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}: it is a ratio of two throughputs")
    return short_ratio * (1 - 1 / rho)


def work_share(short_request_ratio: float, short_service_s: float, mean_service_s: float) -> float:
    """Return w_s = alpha * E[S | short] / E[S]: the share of instance time that short requests use.

    Args:
        short_request_ratio: alpha.
        short_service_s: mean service time of a short request on the undivided fleet.
        mean_service_s: mean service time of any request.

    Raises:
        ValueError: the figures contradict each other.
    """
    _check_share(short_request_ratio)
    if short_service_s < 0 or mean_service_s <= 0:
        raise ValueError(
            f"the mean service time must be positive and the short one not negative, got {mean_service_s} "
            f"and {short_service_s}"
        )
    share = short_request_ratio * short_service_s / mean_service_s
    if share > 1 + 1e-9:
        raise ValueError(
            f"short requests cannot take {share:.3f} of all work, because the mean service time includes them"
        )
    return min(1.0, share)


def two_pool_saving(short_work_ratio: float, rho_short: float, rho_long: float) -> float:
    """Return the exact form for two pools whose instances both differ from the undivided fleet's.

    Args:
        short_work_ratio: w_s.
        rho_short: pace of short requests in the short pool over that on the undivided fleet, per cost.
        rho_long: pace of long requests in the long pool over that on the undivided fleet, per cost.
    """
    return saving(short_work_ratio, rho_short) + saving(1 - short_work_ratio, rho_long)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """Terms of the closed forms, and their results.

    Attributes:
        short_request_ratio: alpha.
        short_work_ratio: w_s.
        rho_short: pace per cost of short requests in the short pool, over that on the undivided fleet.
        rho_long: pace per cost of long requests in the long pool, over that on the undivided fleet.
    """

    short_request_ratio: float
    short_work_ratio: float
    rho_short: float
    rho_long: float = 1.0

    @property
    def by_requests(self) -> float:
        """`alpha * (1 - 1/rho_short)`."""
        return saving(self.short_request_ratio, self.rho_short)

    @property
    def by_work(self) -> float:
        """`w_s * (1 - 1/rho_short)`."""
        return saving(self.short_work_ratio, self.rho_short)

    @property
    def by_both_pools(self) -> float:
        """`w_s * (1 - 1/rho_short) + (1 - w_s) * (1 - 1/rho_long)`."""
        return two_pool_saving(self.short_work_ratio, self.rho_short, self.rho_long)

    def as_json(self) -> dict[str, float]:
        """Return terms and results by name."""
        return {
            "alpha": self.short_request_ratio,
            "w_s": self.short_work_ratio,
            "rho_short": self.rho_short,
            "rho_long": self.rho_long,
            "by_requests": self.by_requests,
            "by_work": self.by_work,
            "by_both_pools": self.by_both_pools,
        }


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"a share of requests or work must be between 0 and 1, got {share}")


def sustainable_rate_per_s(model: PoolModel, slo: Slo) -> float:
    """Return the largest rate of one replica in a pool so large that no request waits for a batch slot.

    The utilisation is below the cap, and the P99 of TTFT and TPOT are within the limits. If even an idle
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


def closed_form(
    undivided: FleetPlan, divided: FleetPlan, mix: LengthMix, slo: Slo, costs: CostTable
) -> ClosedForm:
    """Return the terms of the closed forms, from the sustainable rates of the model.

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
