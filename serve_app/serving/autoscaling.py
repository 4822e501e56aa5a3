"""Autoscaling through Ray Serve: transport of a scheduler's decisions to the controller.

Requests bypass Serve's own counting, and a pool without replicas could not count any. So the scheduler, which
knows the queue, decides for all of its pools (`serve_app.core.scaling`). It records the numbers as its
autoscaling statistics, which Serve sends to its controller. There Serve calls a policy for each deployment,
all in one process: the scheduler's policy stores the numbers, and those of its pools return them.

Serve's own delays are off, because the decision includes them. While the last numbers are too old, such as
between two schedulers, all pools stay unchanged. A scheduler that has just started reports a *minimum* for
each pool, so that nothing is stopped.

The tuner is scaled the same way, from none to one: it starts when its scheduler has enough to learn from.

Gateways are scaled by their CPU usage, which they record themselves, with Serve's own delays.
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
TUNER = "/tuner"
"""Name of the tuner among a scheduler's pools; no pool can have it."""
CPU_CORES = "cpu_cores"
"""Statistic of a gateway: CPU cores used by its process."""

# Target CPU usage of a gateway. A gateway is one event loop, so requests delay each other at higher usage.
_GATEWAY_CORES = 0.6
# Averaging period, because one busy second does not justify another process.
_GATEWAY_LOOK_BACK_S = 10.0
_GATEWAY_UPSCALE_DELAY_S = 5.0
# Tolerance of the mean of many readings above a whole number of gateways.
_ROUNDING = 1e-6


@settings(block="autoscaling")
class GatewayScaling:
    """Bounds of the number of gateways, which follows from their CPU usage."""

    # Minimum number of gateways; with two or more, the endpoint survives the loss of one.
    min_replicas: Annotated[int, at_least(1)] = 1
    # Maximum number of gateways; set it above `min_replicas`.
    max_replicas: Annotated[int, at_least(1)] = 2
    # Time for which fewer gateways must have sufficed before one drains.
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
    """The part of Serve's `AutoscalingContext` that the policies use."""

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
    """Last numbers of every scheduler, in the controller's process.

    A class, because Serve pickles this module's policies by value: each copy would have its own global
    variables, but a class is created once per process.
    """

    _orders: ClassVar[dict[tuple[str | None, str, str], _PoolOrder]] = {}

    @classmethod
    def store(cls, scheduler: tuple[str | None, str], pool: str, order: _PoolOrder) -> None:
        """Store a scheduler's number for a pool."""
        cls._orders[*scheduler, pool] = order

    @classmethod
    def last(cls, scheduler: tuple[str | None, str], pool: str) -> _PoolOrder | None:
        """Return the last number of a pool; None before the first."""
        return cls._orders.get((*scheduler, pool))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Policy of a scheduler's deployment: stores its numbers for its pools, and returns one replica."""

    scheduler: str

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """Return one replica, without policy state."""
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
            ScalingOrders.store((context.app_name, self.scheduler), pool, order)
        return 1, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """Policy of a pool's deployment: returns the number that its scheduler's deployment has decided."""

    scheduler: str
    pool: str

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, without policy state."""
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
    """Policy of the gateways' deployment; `cores` is the target CPU usage of one gateway."""

    cores: float = _GATEWAY_CORES

    def __call__(self, context: ServeContext) -> tuple[int, dict[str, Any]]:
        """Return the number of gateways, without policy state; Serve applies bounds and delays.

        Without readings of every running gateway, the number does not fall.
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
    """Return Ray Serve's `autoscaling_config` of the gateways."""
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
    """Return a scheduler's autoscaling statistics; numbers of pools in `least` are minima."""
    return {
        f"{_LEAST if pool in least else _DESIRED}{pool}": float(count) for pool, count in replicas.items()
    }


def scheduler_config(scheduler: str) -> dict[str, Any]:
    """Return Ray Serve's `autoscaling_config` of a scheduler's deployment."""
    bounds = {"min_replicas": 1, "max_replicas": 1, "initial_replicas": 1}
    return {**bounds, **_config("SchedulerPolicy", {"scheduler": scheduler})}


def tuner_config(scheduler: str) -> dict[str, Any]:
    """Return Ray Serve's `autoscaling_config` of a tuner that its scheduler starts."""
    bounds = {"min_replicas": 0, "max_replicas": 1, "initial_replicas": 0}
    return {**bounds, **_config("PoolPolicy", {"scheduler": scheduler, "pool": TUNER})}


def pool_config(bounds: AutoscalingSettings, scheduler: str, pool: str) -> dict[str, Any]:
    """Return Ray Serve's `autoscaling_config` of a pool's deployment."""
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
