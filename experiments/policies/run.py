"""Which policy serves short prompts soonest, and what does it cost the long ones?

Simulates every policy at every load, on every trace and profile, with every seed. All policies of a case and
seed get the same requests at the same times, and complete them all.

Load 1.0 is the rate at which the same replicas finish the same requests under FCFS when they never run out of
work. The first tenth of requests is not measured.
"""

from experiments.common.experiment import Experiment
from experiments.policies.grid import PolicyGrid, play_grid

EXPERIMENT = Experiment(settings=PolicyGrid, play=play_grid)
