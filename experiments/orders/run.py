"""Is any order of service better than EWSJF for short and for long prompts at once?

The grid is that of `policies`: every order with and without prefill isolation, and ours with and without its
delay bound, on four kinds of traffic at four loads with one, four and sixteen replicas.
"""

from experiments.common.experiment import Experiment
from experiments.orders.points import play_points
from experiments.policies.grid import PolicyGrid

EXPERIMENT = Experiment(settings=PolicyGrid, play=play_points)
