"""Autoscaling of one pool: the settings, and the policy that Ray Serve's controller calls.

Requests bypass Serve's own counting, so Serve's default policy would always see an idle pool. Instead each
replica records its load (`PoolReplica.record_autoscaling_stats`), Serve sends the figures to its controller,
and `PoolPolicy` decides there.

Inputs, per replica, as means over the look-back window, with their age:
- the requests that it holds, and how many of them wait in the engine's own queue;
- its share of the requests that wait in the scheduler for its pool;
- the use of its KV cache.

Scale up to the number of replicas that meets the targets for requests, running or waiting, and for KV cache.
While the engines do not keep up, scale up by one, whatever the targets say. Most requests wait in the
scheduler, because prefill isolation and the TPOT limit hold them back from engines that look idle. Waiting
batch requests add nothing: they use the capacity that other classes leave.

Scale down only when the load fits into fewer replicas with a margin, so that a load near a target does not
add and remove replicas in turn. A replica without recent figures may be saturated, disconnected or just
started; it adds nothing to the load and prevents scaling down. Without any figures the number does not
change. Serve applies `upscale_delay_s`, `downscale_delay_s` and the bounds to the number that this policy
returns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from serve_app.settings_base import ADVANCED, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, settings

ONGOING = "ongoing_requests"
WAITING = "waiting_requests"
KV_USAGE = "kv_usage_ratio"
QUEUED = "queued_requests"


@settings(block="autoscaling")
class AutoscalingSettings:
    """Bounds, targets and delays of one pool's autoscaling."""

    # At least one: a pool without replicas has no figures of waiting requests.
    min_replicas: int = 1
    # Set it above `min_replicas` to let the pool grow.
    max_replicas: int = 1
    # Replicas at deployment; the minimum when not given.
    initial_replicas: Annotated[int | None, ADVANCED] = None
    # Requests per replica, running or waiting for its pool, that the pool is sized for. A replica is full
    # near the engine's max_num_seqs; half of it leaves capacity for a burst while a new replica starts.
    target_ongoing_requests: Annotated[float, POSITIVE] = 32.0
    # Use of the KV cache that the pool is sized for. Long prompts fill the cache before the batch.
    target_kv_ratio: Annotated[float, POSITIVE_SHARE] = 0.85
    # Mean number of requests in an engine's own queue from which the engine does not keep up.
    saturated_waiting: Annotated[float, POSITIVE, ADVANCED] = 1.0
    # Scale down only when the load fits into fewer replicas at this share of the targets.
    downscale_margin_ratio: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.8
    # An engine takes a minute to start, so a shorter burst is over before a new replica serves.
    upscale_delay_s: Annotated[float, NOT_NEGATIVE] = 15.0
    # Another start costs more than some idle minutes.
    downscale_delay_s: Annotated[float, NOT_NEGATIVE] = 300.0
    # Seconds over which the figures of the pool are averaged.
    look_back_period_s: Annotated[float, POSITIVE, ADVANCED] = 15.0
    # Serve sends figures every ten seconds by default (`scripts/serve` sets two).
    stale_after_s: Annotated[float, POSITIVE, ADVANCED] = 35.0

    def __post_init__(self) -> None:
        initial = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not 1 <= self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                "autoscaling: replicas must satisfy 1 <= min <= initial <= max, "
                f"got min {self.min_replicas}, initial {self.initial_replicas}, max {self.max_replicas}"
            )

    def serve_config(self) -> dict[str, Any]:
        """Ray Serve's `autoscaling_config` for these settings, with `PoolPolicy`."""
        return {
            "min_replicas": self.min_replicas,
            "initial_replicas": self.initial_replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_ongoing_requests,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
            "look_back_period_s": self.look_back_period_s,
            # Interval between figures of a replica; five points per window keep the mean steady.
            "metrics_interval_s": min(self.look_back_period_s / 5, 2.0),
            "policy": {
                "policy_function": "serve_app.serving.pool.autoscaling:PoolPolicy",
                "policy_kwargs": {
                    "target_kv_ratio": self.target_kv_ratio,
                    "saturated_waiting": self.saturated_waiting,
                    "downscale_margin_ratio": self.downscale_margin_ratio,
                    "stale_after_s": self.stale_after_s,
                },
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The last figures of a running replica; None when they are too old or missing."""

    ongoing: float | None = None
    waiting: float | None = None
    queued: float | None = None
    kv_usage_ratio: float | None = None


class _Point(Protocol):
    timestamp: float


class _Config(Protocol):
    def get_target_ongoing_requests(self) -> float: ...


class PoolContext(Protocol):
    """The part of Serve's `AutoscalingContext` that the policy reads."""

    target_num_replicas: int
    running_replicas: Sequence[Any]
    current_time: float | None
    config: _Config | None

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Mean over the look-back window, by figure and replica."""

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[_Point]]] | None:
        """Latest points in order of time, by figure and replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """The autoscaling policy; Serve's controller calls it about ten times a second per pool.

    See `AutoscalingSettings` for the attributes.
    """

    target_kv_ratio: float
    saturated_waiting: float
    downscale_margin_ratio: float
    stale_after_s: float

    def __call__(self, context: PoolContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state of our own."""
        if context.config is None:
            return context.target_num_replicas, {}
        loads = [self._load(context, replica) for replica in context.running_replicas]
        target = context.config.get_target_ongoing_requests()
        return self.desired_replicas(loads, context.target_num_replicas, target), {}

    def desired_replicas(
        self, loads: Sequence[ReplicaLoad], current_target: int, target_ongoing: float
    ) -> int:
        """The number of replicas that the pool should have, before bounds and delays.

        Args:
            loads: one per running replica.
            current_target: number that Serve works towards; returned when there are no figures.
            target_ongoing: requests that one replica is sized for.
        """
        known = [load for load in loads if load.ongoing is not None]
        if not known:
            return current_target
        needed = self._replicas_for(loads, target_ongoing, 1.0)
        if sum(load.waiting or 0.0 for load in known) >= self.saturated_waiting * len(known):
            needed = max(needed, len(loads) + 1)
        if needed >= current_target:
            return needed
        if len(known) < len(loads):
            return current_target
        return min(current_target, self._replicas_for(loads, target_ongoing, self.downscale_margin_ratio))

    def _replicas_for(self, loads: Sequence[ReplicaLoad], target_ongoing: float, filled_ratio: float) -> int:
        """Replicas for these loads when each is filled to `filled_ratio` of its targets."""
        ongoing = sum((load.ongoing or 0.0) + (load.queued or 0.0) for load in loads)
        kv_usage = sum(load.kv_usage_ratio or 0.0 for load in loads)
        by_requests = ongoing / (target_ongoing * filled_ratio)
        by_kv = kv_usage / (self.target_kv_ratio * filled_ratio)
        # The loads are means of floats: a load of exactly two replicas must not need three.
        return math.ceil(max(by_requests, by_kv) - 1e-9)

    def _load(self, context: PoolContext, replica: object) -> ReplicaLoad:
        points = (context.raw_metrics or {}).get(ONGOING, {}).get(replica, ())
        if not points or context.current_time is None:
            return ReplicaLoad()
        if context.current_time - points[-1].timestamp > self.stale_after_s:
            return ReplicaLoad()
        means = context.aggregated_metrics or {}
        return ReplicaLoad(
            ongoing=means.get(ONGOING, {}).get(replica),
            waiting=means.get(WAITING, {}).get(replica),
            queued=means.get(QUEUED, {}).get(replica),
            kv_usage_ratio=means.get(KV_USAGE, {}).get(replica),
        )
