"""Tuning: learns length queues from the traffic, and searches better values of scheduler parameters.

In reading order:

- `strategic_loop` learns length queues from prompt lengths (Refine-and-Prune), and decides when to relearn.
- `objective` is the reward: one number for how well an interval of traffic was served.
- `search_space` defines the tunable settings and proposes candidates (TPE), and `study` compares candidates
  on windows of traffic until one wins or the budget is spent.
- `digital_twin` stores outcomes, plays windows of them on simulated engines, and has presets as candidates.
  `engine_fit` fits those engines to the real ones.
- `rollout` brings a winner into production, if it proves better in a trial with one sequential test, and
  `parameter_loop` connects all of it to a running scheduler.
- `settings` has all settings.

Nothing in this package reads a clock: time is an argument.
"""

from serve_app.tuning.strategic_loop import (
    LearnedPartitions,
    RefineAndPruneSettings,
    StrategicSettings,
    partition_distance,
    refine_and_prune,
)

__all__ = [
    "LearnedPartitions",
    "RefineAndPruneSettings",
    "StrategicSettings",
    "partition_distance",
    "refine_and_prune",
]
