"""Closed forms for the saving of a split fleet, each exact under its assumption.

One pool of instances serves all requests. After the split, requests up to `B_short` have instances of their
own, which serve them `rho` times as fast. The instances needed are work divided by pace, so the saving is:

    share of requests   alpha * (1 - 1/rho)                 token-budget pool routing, arXiv 2604.09613
    share of work       w_s   * (1 - 1/rho)                 with w_s = alpha * E[S | short] / E[S]
    both pools changed  w_s   * (1 - 1/rho_short) + (1 - w_s) * (1 - 1/rho_long)

The first form assigns every request the same work. Short requests are less work than the mean, so it promises
too much; it is exact only when E[S | short] = E[S].

The second counts instances. With S the instance time of a request on the undivided fleet, N = rate * E[S].
Short requests occupy the share w_s of it, and need 1/rho of that after the split.

The third lets the instances of the long pool change as well. Without short requests in its batches, a long
pool may be slower; `rho_long` is then below 1.

All three ignore the price of two pools in a small fleet: each pool needs its own reserve against
fluctuations, and is rounded up to whole instances.
"""

from dataclasses import dataclass


def saving(short_ratio: float, rho: float) -> float:
    """The share of instances that is saved, `share * (1 - 1/rho)`.

    Args:
        short_ratio: share of the short requests: alpha of all requests (the papers' form), or w_s of all work
            (the exact form when the long pool's instances do not change).
        rho: pace of short requests on the short pool's instances over that on the undivided fleet's. The
            papers take the throughputs of whole instances.

    Raises:
        ValueError: the share is outside 0 to 1, or `rho` is not positive.
    """
    _check_share(short_ratio)
    if not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}: it is a ratio of two paces")
    return short_ratio * (1 - 1 / rho)


def work_share(short_request_ratio: float, short_service_s: float, mean_service_s: float) -> float:
    """w_s = alpha * E[S | short] / E[S]: the share of instance time that short requests take.

    Args:
        short_request_ratio: alpha.
        short_service_s: mean service time of a short request on the undivided fleet.
        mean_service_s: the same of any request.

    Raises:
        ValueError: the figures contradict each other.
    """
    _check_share(short_request_ratio)
    if short_service_s < 0 or mean_service_s <= 0:
        raise ValueError(
            f"service times must be positive, got {short_service_s} short and {mean_service_s} in the mean"
        )
    share = short_request_ratio * short_service_s / mean_service_s
    if share > 1 + 1e-9:
        raise ValueError(
            f"short requests cannot take {share:.3f} of all work: the mean service time includes theirs"
        )
    return min(1.0, share)


def two_pool_saving(short_work_ratio: float, rho_short: float, rho_long: float) -> float:
    """The exact form when both pools' instances differ from the undivided fleet's.

    Args:
        short_work_ratio: w_s.
        rho_short: pace of short requests in the short pool over that on the undivided fleet, per cost.
        rho_long: the same of long requests in the long pool.
    """
    return saving(short_work_ratio, rho_short) + saving(1 - short_work_ratio, rho_long)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The terms of the closed forms, and their results.

    Attributes:
        short_request_ratio: alpha.
        short_work_ratio: w_s.
        rho_short: pace per cost of short requests in the short pool, over that on the undivided fleet.
        rho_long: the same of long ones in the long pool.
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
        """Terms and results by name."""
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
        raise ValueError(f"a share of requests or work must be within 0 and 1, got {share}")
