"""Autoscaling: the number of replicas of each pool of a model, decided for all pools together.

It is pure, like the scheduler whose state it reads: time is an argument, and the simulator and the live
scheduler run the same `FleetScaler`. All of it is in `pool_scaler`.
"""

from serve_app.core.scaling.pool_scaler import (
    AutoscalingSettings,
    FleetScaler,
    PoolDecision,
    ScaledPool,
    ScalingSettings,
    observe,
)

__all__ = [
    "AutoscalingSettings",
    "FleetScaler",
    "PoolDecision",
    "ScaledPool",
    "ScalingSettings",
    "observe",
]
