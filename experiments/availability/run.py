"""What do clients see while parts of an application die or are replaced, and how soon is it complete again?

There are two parts, both with steady streamed requests to a served application:

- `deaths`: processes and nodes are killed or halted.
- `rollouts`: the application is redeployed with other settings.
"""

from experiments.availability import deaths, rollouts
from experiments.common.experiment import experiment_of_parts

EXPERIMENT = experiment_of_parts(
    {"deaths": deaths.EXPERIMENT, "rollouts": rollouts.EXPERIMENT},
    only_by_name="it takes an hour and a half: name it",
)
