"""Autoscaling: the number of replicas of each pool of a model, decided for all pools together.

It is pure, like the scheduler whose state it reads: time is an argument, and the simulator and the live
scheduler run the same `FleetScaler`. Read `observation` (load and speed of a pool), then `scaler` (the needs
of one pool, the GPU budget, and the fleet).
"""

from serve_app.core.scaling.observation import observe
from serve_app.core.scaling.scaler import FleetScaler, PoolDecision
from serve_app.core.scaling.settings import AutoscalingSettings, ScaledPool, ScalingSettings

__all__ = [
    "AutoscalingSettings",
    "FleetScaler",
    "PoolDecision",
    "ScaledPool",
    "ScalingSettings",
    "observe",
]
