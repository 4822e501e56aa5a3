"""Which length queues are best for scheduling?

The same grid as in `policies`, under one policy, `ewsjf`. Only the partition differs: a single queue, fixed
queues, and queues learned by Refine-and-Prune in its variants. Isolation is the same for all, and
`fcfs-isolated` shows what is left of it without any order.
"""

from experiments.common.experiment import Experiment
from experiments.policies.grid import PolicyGrid
from experiments.policies.measurements import play_grid

EXPERIMENT = Experiment(settings=PolicyGrid, play=play_grid)
