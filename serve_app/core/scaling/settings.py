"""Settings of autoscaling: bounds of each pool, and the GPU budget of all pools of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from serve_app.core.settings_base import (
    ADVANCED,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    at_least,
    settings,
)


@settings(block="autoscaling")
class AutoscalingSettings:
    """Bounds of one pool's autoscaling. The number of replicas within them follows from the pool's work."""

    # 0 stops all engines of a pool without requests. The next request then waits for an engine to start.
    min_replicas: Annotated[int, at_least(0)] = 1
    # Set it above `min_replicas` to let the pool grow.
    max_replicas: Annotated[int, at_least(1)] = 1
    # Replicas at deployment; `min_replicas` by default.
    initial_replicas: Annotated[int | None, at_least(0), ADVANCED] = None
    # Seconds for which fewer replicas must have been enough before some are stopped. Another start costs more
    # than some idle minutes.
    downscale_delay_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 300.0
    # Share of a replica's measured speed that the mean arrivals may use. The rest is headroom for bursts
    # while another engine starts. A higher share saves replicas and lengthens the tail of TTFT.
    target_utilization_ratio: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.7
    # Queue time of a request above the batch class that adds a replica, regardless of the measured speeds.
    target_wait_s: Annotated[float, POSITIVE, INTERNAL] = 5.0

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.first_replicas <= self.max_replicas:
            raise ValueError(
                "autoscaling: replicas must satisfy 0 <= min <= initial <= max, "
                f"got min {self.min_replicas}, initial {self.initial_replicas}, max {self.max_replicas}"
            )

    @property
    def first_replicas(self) -> int:
        """Replicas at deployment."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPool:
    """The scaling settings of one pool.

    Attributes:
        autoscaling: its bounds; None for a pool that is not autoscaled here: then its need is not bounded.
        replicas: its fixed number of replicas, if it is not scaled at all.
    """

    autoscaling: AutoscalingSettings | None = None
    replicas: int | None = None
    gpus: float = 0.0

    @property
    def least(self) -> int:
        """Minimum number of replicas."""
        return self.autoscaling.min_replicas if self.autoscaling is not None else self.replicas or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """The scaling settings of all pools of a model.

    Attributes:
        gpu_budget: GPUs that they may use together; None for no limit.
    """

    pools: Mapping[str, ScaledPool] = field(default_factory=dict)
    gpu_budget: float | None = None

    def __post_init__(self) -> None:
        least = sum(pool.gpus * pool.least for pool in self.pools.values())
        if self.gpu_budget is not None and least > self.gpu_budget:
            raise ValueError(
                f"gpu_budget of {self.gpu_budget:g} is below the {least:g} GPUs that its pools have "
                "at least: raise it, or lower their min_replicas and replicas"
            )
