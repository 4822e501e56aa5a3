"""Is any order of service better than EWSJF for short and for long prompts at once?

The grid is that of `policies`: orders with prefill isolation, and ours with and without its delay bound, on
four kinds of traffic at two loads.
"""

from experiments.common.experiment import Experiment
from experiments.orders.points import play_points
from experiments.policies.grid import PolicyGrid

EXPERIMENT = Experiment(settings=PolicyGrid, play=play_points)
