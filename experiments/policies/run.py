"""Which policy serves short prompts soonest, what does it cost long ones, and what if its assumptions fail?

Simulates every policy at every load, on every trace and profile, with every seed. All policies of a case and
seed get the same requests at the same times, and complete them all. There are four parts:

- `comparison`: all policies.
- `robustness`: cases that disturb a policy's inputs or the arrivals: wrong lengths, late reports of first
  tokens, bursts, a mix that flips, a flooding tenant.
- `orders`: orders with prefill isolation, and ours with and without its delay bound.
- `frontier`: ours with other values of what decides how long the longest prompts wait.

Load 1.0 is the rate at which the same replicas finish the same requests under FCFS when they never run out of
work. The first tenth of requests is not measured.
"""

from experiments.common.experiment import Experiment, experiment_of_parts
from experiments.policies.grid import PolicyGrid, play_grid
from experiments.policies.orders import play_points

_GRID = Experiment(settings=PolicyGrid, play=play_grid)
_ORDERS = Experiment(settings=PolicyGrid, play=play_points)

EXPERIMENT = experiment_of_parts(
    {"comparison": _GRID, "robustness": _GRID, "orders": _ORDERS, "frontier": _GRID}
)
