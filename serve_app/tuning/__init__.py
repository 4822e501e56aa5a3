"""Tuning: learns length queues from the traffic, and searches better values of scheduler parameters.

In reading order:

- `refine_and_prune` learns length queues from prompt lengths; `strategic_loop` decides when to relearn.
- `objective` is the reward: one number for how well an interval of traffic was served.
- `search_space` defines the tunable settings, `search` has presets as candidates, `optimiser`
  proposes further ones (TPE), and `study` compares them on windows of traffic until one wins or the budget is
  spent.
- `outcome_window` collects outcomes in the scheduler, `traffic` stores them, and `digital_twin` plays windows
  of them on simulated engines. `engine_fit` fits those engines to the real ones, driven by
  `twin_calibration`.
- `rollout` brings a winner into production, if it proves better in a `trial` with one sequential test, and
  `parameter_loop` connects all of it to a running scheduler.
- `settings` has all settings.

Nothing in this package reads a clock: time is an argument.
"""

from serve_app.tuning.refine_and_prune import RefineAndPruneSettings, refine_and_prune
from serve_app.tuning.strategic_loop import LearnedPartitions, StrategicSettings, partition_distance

__all__ = [
    "LearnedPartitions",
    "RefineAndPruneSettings",
    "StrategicSettings",
    "partition_distance",
    "refine_and_prune",
]
