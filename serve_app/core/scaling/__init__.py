"""Autoscaling: how many replicas each pool of a model needs, decided for all of them together.

Pure, like the scheduler whose state it reads: time is an argument, and the simulator and the live scheduler
run the same `FleetScaler`. Read `observation` (what is seen of a pool), `speed` (what a token costs an
engine), `pool_scaler` (what one pool needs), `gpu_budget` (who gets the next GPU) and `fleet_scaler` (all
together).
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
