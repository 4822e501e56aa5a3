"""Tuning: length queues learned from the traffic, and better values for the scheduler's parameters.

Five sub-packages, each with a reading guide of its own:

- `partition`: Refine-and-Prune learns length queues; the strategic loop says when.
- `objective`: the reward, one number for how well traffic was served.
- `search`: what may change, what to try next (TPE or random), and paired comparisons that decide.
- `twin`: recent traffic played on simulated engines, to see what a candidate would make of it.
- `online`: the tuner beside a running scheduler, which brings a result into production in guarded trials.

Each imports only those above it in this list. `command` and `arguments` are `python -m serve_app tune`, which
does a search offline.

Nothing here reads a clock: time is an argument.
"""

from serve_app.tuning.partition.drift import DriftSettings, has_drifted
from serve_app.tuning.partition.refine_and_prune import refine_and_prune
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.partition.strategic_loop import (
    LearnedPartitions,
    StrategicSettings,
    partition_distance,
)

__all__ = [
    "DriftSettings",
    "LearnedPartitions",
    "RefineAndPruneSettings",
    "StrategicSettings",
    "has_drifted",
    "partition_distance",
    "refine_and_prune",
]
