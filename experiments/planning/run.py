"""Do two pools save GPUs, and do they preempt and reject less than one pool of as many GPUs?

There are two parts:

- `plans`: fleets that meet limits, and how accurate the closed forms are.
- `pressure`: fleets of as many GPUs each, under KV pressure.
"""

from experiments.common.experiment import experiment_of_parts
from experiments.planning import plans, pressure

EXPERIMENT = experiment_of_parts({"plans": plans.EXPERIMENT, "pressure": pressure.EXPERIMENT})
