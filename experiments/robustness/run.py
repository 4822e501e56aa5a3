"""What happens to each policy when its assumptions fail?

The same grid as in `policies`, with cases that disturb what a policy is told or what arrives: lengths that
are off, first tokens that are reported late, bursts, a mix that flips, a tenant that floods.
"""

from experiments.common.experiment import Experiment
from experiments.policies.grid import PolicyGrid, play_grid

EXPERIMENT = Experiment(settings=PolicyGrid, play=play_grid)
