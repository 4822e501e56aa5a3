"""How many replicas does a pool need?

Requests reach a replica past Serve's own counting, so Serve's default policy would see an idle pool for ever.
Instead each replica records its load (`PoolReplica.record_autoscaling_stats`), Serve carries the figures to
its controller, and `PoolPolicy` decides there.

Inputs: per replica the requests that it holds, how many of them wait in the engine's own queue, its share of
those that wait in the scheduler for its pool, and the use of its KV cache, each as a mean over the look-back
window; and how old these figures are.
Behaviour: scale up to the number that meets the targets for requests, held or waiting, and for KV cache; and
by one more than run while the engines do not keep up, whatever the targets say. Most of a queue stands in the
scheduler, where prefill isolation and the limit on time per output token hold requests back from engines that
look idle. Batch work that waits there calls for nobody: it is meant for what others leave.
Scale down only when the load would fit into fewer replicas with room to spare, so that a load on the border
does not move replicas to and fro. A replica that has not recorded for a while (it may be saturated, cut off,
or just started) adds nothing to the load and forbids scaling down; with no figures at all the number stays as
it is. How fast: Serve applies `upscale_delay_s` and `downscale_delay_s`, and the bounds, to what this policy
returns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from serve_app.settings_base import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, settings

ONGOING = "ongoing_requests"
WAITING = "waiting_requests"
KV_USAGE = "kv_usage_ratio"
QUEUED = "queued_requests"


@settings(block="autoscaling")
class AutoscalingSettings:
    """Bounds and pace of one pool's autoscaling."""

    # At least one: nothing would tell a pool without replicas that requests wait for it.
    min_replicas: int = 1
    # Set it above `min_replicas` to let the pool grow.
    max_replicas: int = 1
    # Replicas at deployment; the minimum when not given.
    initial_replicas: int | None = None
    # Requests per replica, running or waiting for its pool, that the pool is sized for. Near the engine's
    # max_num_seqs a replica is full; half of it leaves room for a burst while a new one starts.
    target_ongoing_requests: Annotated[float, POSITIVE] = 32.0
    # KV use that the pool is sized for. Long prompts fill the cache before they fill the batch.
    target_kv_ratio: Annotated[float, POSITIVE_SHARE] = 0.85
    # Requests in an engine's own queue, as a mean over the window, from which it does not keep up.
    saturated_waiting: Annotated[float, POSITIVE] = 1.0
    # A pool is shrunk only when what it holds fits into fewer replicas at this share of the targets.
    downscale_margin_ratio: Annotated[float, POSITIVE_SHARE] = 0.8
    # An engine takes a minute to start, so a short burst is over before help comes; a long one is not.
    upscale_delay_s: Annotated[float, NOT_NEGATIVE] = 15.0
    # Starting again is dearer than idling for some minutes.
    downscale_delay_s: Annotated[float, NOT_NEGATIVE] = 300.0
    # Seconds over which the figures of the pool are averaged.
    look_back_period_s: Annotated[float, POSITIVE] = 15.0
    # Serve pushes figures every ten seconds unless told otherwise (`scripts/serve` sets two).
    stale_after_s: Annotated[float, POSITIVE] = 35.0

    def __post_init__(self) -> None:
        initial = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not 1 <= self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                "autoscaling: replicas must satisfy 1 <= min <= initial <= max, "
                f"got min {self.min_replicas}, initial {self.initial_replicas}, max {self.max_replicas}"
            )

    def serve_config(self) -> dict[str, Any]:
        """The same as Ray Serve's `autoscaling_config`, with our policy in it."""
        return {
            "min_replicas": self.min_replicas,
            "initial_replicas": self.initial_replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_ongoing_requests,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
            "look_back_period_s": self.look_back_period_s,
            # How often a replica is asked for its figures; five points to a window keep the mean steady.
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
    """What one running replica last recorded, None when that is too old or never came."""

    ongoing: float | None = None
    waiting: float | None = None
    queued: float | None = None
    kv_usage_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """What one replica is meant to hold."""

    ongoing: float
    saturated_waiting: float
    kv_usage_ratio: float
    downscale_margin_ratio: float


def desired_replicas(loads: Sequence[ReplicaLoad], current_target: int, targets: ScalingTargets) -> int:
    """The number of replicas that the pool should have, before bounds and delays.

    Args:
        loads: one entry per running replica.
        current_target: the number that Serve is working towards; the answer when nothing is known.
        targets: what one replica is meant to hold.
    """
    known = [load for load in loads if load.ongoing is not None]
    if not known:
        return current_target
    needed = _replicas_for(loads, targets, 1.0)
    if sum(load.waiting or 0.0 for load in known) >= targets.saturated_waiting * len(known):
        needed = max(needed, len(loads) + 1)
    if needed >= current_target:
        return needed
    if len(known) < len(loads):
        return current_target
    return min(current_target, _replicas_for(loads, targets, targets.downscale_margin_ratio))


def _replicas_for(loads: Sequence[ReplicaLoad], targets: ScalingTargets, filled_ratio: float) -> int:
    """Replicas that hold these loads when each is filled to `filled_ratio` of its targets."""
    ongoing = sum((load.ongoing or 0.0) + (load.queued or 0.0) for load in loads)
    kv_usage = sum(load.kv_usage_ratio or 0.0 for load in loads)
    by_requests = ongoing / (targets.ongoing * filled_ratio)
    by_kv = kv_usage / (targets.kv_usage_ratio * filled_ratio)
    # Means of floats: a load of exactly two replicas must not ask for three.
    return math.ceil(max(by_requests, by_kv) - 1e-9)


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
        """Name of a figure, replica, mean over the look-back window."""

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[_Point]]] | None:
        """Name of a figure, replica, its latest points in order of time."""


class PoolPolicy:
    """The autoscaling policy that Serve's controller calls about ten times a second for each pool."""

    def __init__(
        self,
        target_kv_ratio: float,
        saturated_waiting: float,
        downscale_margin_ratio: float,
        stale_after_s: float,
    ) -> None:
        self._target_kv_ratio = target_kv_ratio
        self._saturated_waiting = saturated_waiting
        self._downscale_margin_ratio = downscale_margin_ratio
        self._stale_after_s = stale_after_s

    def __call__(self, context: PoolContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, and no state of our own."""
        if context.config is None:
            return context.target_num_replicas, {}
        targets = ScalingTargets(
            ongoing=context.config.get_target_ongoing_requests(),
            saturated_waiting=self._saturated_waiting,
            kv_usage_ratio=self._target_kv_ratio,
            downscale_margin_ratio=self._downscale_margin_ratio,
        )
        loads = [self._load(context, replica) for replica in context.running_replicas]
        return desired_replicas(loads, context.target_num_replicas, targets), {}

    def _load(self, context: PoolContext, replica: object) -> ReplicaLoad:
        points = (context.raw_metrics or {}).get(ONGOING, {}).get(replica, ())
        if not points or context.current_time is None:
            return ReplicaLoad()
        if context.current_time - points[-1].timestamp > self._stale_after_s:
            return ReplicaLoad()
        means = context.aggregated_metrics or {}
        return ReplicaLoad(
            ongoing=means.get(ONGOING, {}).get(replica),
            waiting=means.get(WAITING, {}).get(replica),
            queued=means.get(QUEUED, {}).get(replica),
            kv_usage_ratio=means.get(KV_USAGE, {}).get(replica),
        )
