"""What is learned from the traffic: length queues, and better values for the scheduler's parameters.

To learn queues, read `partition_settings` (every open point of the sources as a switch), `refine_and_prune`
(the steps), `gaps` (coarse, refine), `stable_refinement` (why ours does not follow the sample's size) and
`utility` (prune). `length_sample` keeps what is learned from, `drift` says when to learn again,
`partition_distance` whether the result differs, `online_adjustment` what moves in between; `strategic` puts
them together.

To tune parameters, read `objective` (what is better: `service_class`, `slo_reward`, `paper_reward`),
`search_space` and `tunable` (what may change), `optimiser` (what to try next), `traffic` and `digital_twin`
(what would come of it), `comparison` (whether that is luck) and `study`, which puts them together; `command`
does it offline. `rollout` and `canary` bring a result into production without harm, `slice_noise`, `replay` and
`control_variate` tell them what is only the traffic's doing; `parameter_loop` is all of it beside a running
scheduler, and `tuned_world` simulates such a production.

Nothing here reads a clock: whoever runs a loop tells the time.
"""

from serve_app.tuning.partition.drift import Drift, DriftSettings, has_drifted
from serve_app.tuning.partition.length_sample import LengthSample
from serve_app.tuning.partition.partition_distance import distance
from serve_app.tuning.partition.refine_and_prune import LengthsError, refine_and_prune
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.partition.strategic_loop import LearnedPartitions, StrategicLoop, StrategicSettings

__all__ = [
    "Drift",
    "DriftSettings",
    "LearnedPartitions",
    "LengthSample",
    "LengthsError",
    "RefineAndPruneSettings",
    "StrategicLoop",
    "StrategicSettings",
    "distance",
    "has_drifted",
    "refine_and_prune",
]
