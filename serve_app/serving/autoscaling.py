"""Autoscaling through Ray Serve: how the number that a scheduler has decided reaches the controller.

Requests bypass Serve's own counting, and a pool without replicas could not count anything. So the scheduler
decides for all of its pools (`serve_app.core.scaling`), as the only one that knows what waits. It records the
numbers as its autoscaling statistics, which Serve sends to its controller. There Serve asks a policy for
each deployment, all in one process: the scheduler's policy keeps the numbers, those of its pools return them.

Serve's own delays are off, because the decision has them. While the last numbers are too old, such as
between two schedulers, every pool stays as it is. A scheduler that has just started tells the *least* that a
pool should have: nothing is stopped then.

Gateways are scaled by their own processor time, which they record; no scheduler knows it. There Serve's own
delays apply.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from serve_app.core.scaling import AutoscalingSettings
from serve_app.core.settings_base import ADVANCED, NOT_NEGATIVE, at_least, settings

# Serve sends statistics every ten seconds by default (`scripts/serve` sets two).
_STALE_AFTER_S = 35.0
_LOOK_BACK_S = 2.0
_INTERVAL_S = 1.0
_DESIRED, _LEAST = "desired_replicas:", "least_replicas:"
CPU_CORES = "cpu_cores"
"""The statistic of a gateway: cores that its process uses."""

# A gateway is one event loop. Beyond so much of a core, requests begin to wait for each other.
_GATEWAY_CORES = 0.6
# One busy second is no reason for another process.
_GATEWAY_LOOK_BACK_S = 10.0
_GATEWAY_UPSCALE_DELAY_S = 5.0
# What the mean of many readings may be above a whole number of gateways.
_ROUNDING = 1e-6


@settings(block="autoscaling")
class GatewayScaling:
    """Bounds of the number of gateways. It follows from the processor time that they use."""

    # Two or more keep the endpoint up when one dies.
    min_replicas: Annotated[int, at_least(1)] = 1
    # The most that there may be; set it above `min_replicas`.
    max_replicas: Annotated[int, at_least(1)] = 2
    # How long fewer gateways must have been enough before one drains.
    downscale_delay_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 300.0

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"autoscaling: min_replicas of {self.min_replicas} is above max_replicas of "
                f"{self.max_replicas}: raise the latter"
            )


class _Point(Protocol):
    timestamp: float
    value: float


class ServeContext(Protocol):
    """The part of Serve's `AutoscalingContext` that the policies read."""

    app_name: str | None
    target_num_replicas: int
    running_replicas: Sequence[Any]
    current_time: float | None

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[_Point]]] | None:
        """Latest points in order of time, by statistic and replica."""


@dataclass(frozen=True, slots=True)
class _PoolOrder:
    replicas: int
    at: float
    is_least: bool


class ScalingOrders:
    """The last numbers of every scheduler, in the controller's process."""

    _orders: ClassVar[dict[tuple[str | None, str, str], _PoolOrder]] = {}

    @classmethod
    def keep(cls, scheduler: tuple[str | None, str], pool: str, order: _PoolOrder) -> None:
        """Keep what a scheduler wants of a pool."""
        cls._orders[*scheduler, pool] = order

    @classmethod
    def last(cls, scheduler: tuple[str | None, str], pool: str) -> _PoolOrder | None:
        """The last number of a pool; None before the first."""
        return cls._orders.get((*scheduler, pool))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Keeps what a scheduler wants of its pools; of itself there is always one.

    Attributes:
        scheduler: name of its deployment.
    """

    scheduler: str

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """One replica, and no state of our own."""
        newest: dict[str, _PoolOrder] = {}
        for name, by_replica in (context.raw_metrics or {}).items():
            kind, colon, pool = name.partition(":")
            if kind + colon not in (_DESIRED, _LEAST):
                continue
            for point in (points[-1] for points in by_replica.values() if points):
                order = _PoolOrder(round(point.value), point.timestamp, kind + colon == _LEAST)
                if pool not in newest or order.at > newest[pool].at:
                    newest[pool] = order
        for pool, order in newest.items():
            ScalingOrders.keep((context.app_name, self.scheduler), pool, order)
        return 1, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """Returns what the scheduler of a pool wants.

    Attributes:
        scheduler: name of the scheduler's deployment.
        pool: the pool's name in its model.
    """

    scheduler: str
    pool: str

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state of our own."""
        order = ScalingOrders.last((context.app_name, self.scheduler), self.pool)
        if order is None or context.current_time is None:
            return context.target_num_replicas, {}
        if context.current_time - order.at > _STALE_AFTER_S:
            return context.target_num_replicas, {}
        if order.is_least:
            return max(order.replicas, context.target_num_replicas), {}
        return order.replicas, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPolicy:
    """As many gateways as their processor time needs.

    Attributes:
        cores: of the processor that one may use.
    """

    cores: float = _GATEWAY_CORES

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """The number of gateways, and no state of our own; Serve applies bounds and delays.

        While nothing is known of a gateway that runs, there are not fewer than now.
        """
        recorded = (context.raw_metrics or {}).get(CPU_CORES, {})
        means = [_mean(recorded[each]) for each in context.running_replicas if recorded.get(each)]
        needed = max(1, math.ceil(sum(means) / self.cores - _ROUNDING))
        if len(means) < len(context.running_replicas) or not means:
            needed = max(needed, context.target_num_replicas)
        return needed, {}


def _mean(points: Sequence[_Point]) -> float:
    return sum(point.value for point in points) / len(points)


def gateway_config(bounds: GatewayScaling) -> dict[str, Any]:
    """Ray Serve's `autoscaling_config` of the gateways."""
    return {
        **_config("GatewayPolicy", {"cores": _GATEWAY_CORES}),
        "min_replicas": bounds.min_replicas,
        "initial_replicas": bounds.min_replicas,
        "max_replicas": bounds.max_replicas,
        "upscale_delay_s": _GATEWAY_UPSCALE_DELAY_S,
        "downscale_delay_s": bounds.downscale_delay_s,
        "look_back_period_s": _GATEWAY_LOOK_BACK_S,
    }


def statistics(replicas: Mapping[str, int], least: Container[str] = ()) -> dict[str, float]:
    """A scheduler's numbers as the statistics that it records.

    Args:
        least: pools of which nothing is to be stopped.
    """
    return {
        f"{_LEAST if pool in least else _DESIRED}{pool}": float(count) for pool, count in replicas.items()
    }


def scheduler_config(scheduler: str) -> dict[str, Any]:
    """Ray Serve's `autoscaling_config` of a scheduler's deployment."""
    bounds = {"min_replicas": 1, "max_replicas": 1, "initial_replicas": 1}
    return {**bounds, **_config("SchedulerPolicy", {"scheduler": scheduler})}


def pool_config(bounds: AutoscalingSettings, scheduler: str, pool: str) -> dict[str, Any]:
    """Ray Serve's `autoscaling_config` of a pool's deployment."""
    return {
        "min_replicas": bounds.min_replicas,
        "initial_replicas": bounds.first_replicas,
        "max_replicas": bounds.max_replicas,
        **_config("PoolPolicy", {"scheduler": scheduler, "pool": pool}),
    }


def _config(policy: str, arguments: Mapping[str, object]) -> dict[str, Any]:
    return {
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "look_back_period_s": _LOOK_BACK_S,
        "metrics_interval_s": _INTERVAL_S,
        "policy": {"policy_function": f"{__name__}:{policy}", "policy_kwargs": dict(arguments)},
    }
