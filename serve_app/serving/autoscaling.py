"""Autoscaling through Ray Serve: how the number that a scheduler has decided reaches the controller.

Requests bypass Serve's own counting, and a pool without replicas could not count anything. So the scheduler
decides for all of its pools (`serve_app.scaling`), as the only one that knows what waits. It records the
numbers as its autoscaling statistics, which Serve sends to its controller. There Serve asks a policy for
each deployment, all in one process: the scheduler's policy keeps the numbers, those of its pools return them.

Serve's own delays are off, because the decision has them. While the last numbers are too old, such as
between two schedulers, every pool stays as it is. A scheduler that has just started tells the *least* that a
pool should have: nothing is stopped then.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from serve_app.scaling import AutoscalingSettings

# Serve sends statistics every ten seconds by default (`scripts/serve` sets two).
_STALE_AFTER_S = 35.0
_LOOK_BACK_S = 2.0
_INTERVAL_S = 1.0
_DESIRED, _LEAST = "desired_replicas:", "least_replicas:"


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


def pool_config(settings: AutoscalingSettings, scheduler: str, pool: str) -> dict[str, Any]:
    """Ray Serve's `autoscaling_config` of a pool's deployment."""
    return {
        "min_replicas": settings.min_replicas,
        "initial_replicas": settings.first_replicas,
        "max_replicas": settings.max_replicas,
        **_config("PoolPolicy", {"scheduler": scheduler, "pool": pool}),
    }


def _config(policy: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    return {
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "look_back_period_s": _LOOK_BACK_S,
        "metrics_interval_s": _INTERVAL_S,
        "policy": {"policy_function": f"{__name__}:{policy}", "policy_kwargs": dict(arguments)},
    }
