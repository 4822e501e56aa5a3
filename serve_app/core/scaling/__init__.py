"""Autoscaling: the number of replicas of each pool of a model, decided for all pools together.

It is pure, like the scheduler whose state it reads: time is an argument, and the simulator and the live
scheduler run the same `FleetScaler`. Read `observation` (the load of a pool, the speed of its engines), then
`pool_scaler` (the need of one pool, and of all).
"""

from serve_app.core.scaling.observation import observe
from serve_app.core.scaling.pool_scaler import (
    AutoscalingSettings,
    FleetScaler,
    PoolDecision,
    ScaledPool,
    ScalingSettings,
)

__all__ = [
    "AutoscalingSettings",
    "FleetScaler",
    "PoolDecision",
    "ScaledPool",
    "ScalingSettings",
    "observe",
]
