"""What happens to each policy when its assumptions fail?

The grid is that of `policies`, with cases that disturb a policy's inputs or the arrivals: wrong lengths, late
reports of first tokens, bursts, a mix that flips, a flooding tenant.
"""

from experiments.common.experiment import Experiment
from experiments.policies.grid import PolicyGrid, play_grid

EXPERIMENT = Experiment(settings=PolicyGrid, play=play_grid)
