"""Tuning: length queues learned from the traffic, and better values for the scheduler's parameters.

In the order in which to read:

- `refine_and_prune` learns length queues from prompt lengths; `strategic_loop` decides when to learn again.
- `objective` is the reward: one number for how well an interval of traffic was served.
- `search_space` says which settings may change, `optimiser` proposes values (TPE), and `study` spends windows
  of traffic on candidates until one has won or none has.
- `traffic` keeps recent requests, `digital_twin` plays windows of them on simulated engines, and `engine_fit`
  fits those engines to the real ones.
- `rollout` brings a winner into production in guarded steps, each a `trial` under one sequential test, and
  `parameter_loop` connects all of it to a running scheduler.
- `settings` puts the settings of all of them together.

`command` is `python -m serve_app tune`, a search offline. Nothing here reads a clock: time is an argument.
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
