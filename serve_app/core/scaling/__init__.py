"""Autoscaling: the number of replicas of each pool of a model, decided for all pools together.

It is pure, like the scheduler whose state it reads: time is an argument, and the simulator and the live
scheduler run the same `FleetScaler`. Read `observation` (the load of a pool), `speed` and `start_time` (of
its engines), `pool_scaler` (the need of one pool), `gpu_budget`, then `fleet_scaler`.
"""

from serve_app.core.scaling.fleet_scaler import FleetScaler
from serve_app.core.scaling.observation import observe
from serve_app.core.scaling.pool_scaler import PoolDecision
from serve_app.core.scaling.settings import AutoscalingSettings, ScaledPool, ScalingSettings

__all__ = [
    "AutoscalingSettings",
    "FleetScaler",
    "PoolDecision",
    "ScaledPool",
    "ScalingSettings",
    "observe",
]
