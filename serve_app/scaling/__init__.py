"""Autoscaling: how many replicas each pool of a model needs, decided for all of them together.

Pure, like the scheduler whose state it reads: time is an argument, and the simulator and the live scheduler
run the same `FleetScaler`. Read `observation` (what is seen of a pool), `speed` (what a token costs an
engine), `pool_scaler` (what one pool needs), `gpu_budget` (who gets the next GPU) and `fleet_scaler` (all
together).
"""

from serve_app.scaling.fleet_scaler import FleetScaler
from serve_app.scaling.observation import observe
from serve_app.scaling.pool_scaler import PoolDecision
from serve_app.scaling.settings import AutoscalingSettings, ScaledPool, ScalingSettings

__all__ = [
    "AutoscalingSettings",
    "FleetScaler",
    "PoolDecision",
    "ScaledPool",
    "ScalingSettings",
    "observe",
]
