"""What is prefix affinity worth, what does it cost, and what does it cost to learn the speeds of replicas?

There are two parts:

- `affinity`: conversations and sessions on equal replicas, chosen with and without cached prefixes.
- `speeds`: replicas of unlike speed, with speeds that are learned, known or ignored.
"""

from experiments.common.experiment import experiment_of_parts
from experiments.placement import affinity, speeds

EXPERIMENT = experiment_of_parts({"affinity": affinity.EXPERIMENT, "speeds": speeds.EXPERIMENT})
