"""Does a Bayesian search find better settings than presets, and what does tuning gain while traffic changes?

There are two parts:

- `searches`: what both kinds of search recommend in the twin, from the defaults and from a bad start.
- `drift`: a running system with the tuner beside it, whose traffic changes half-way, in simulated time.
"""

from experiments.common.experiment import experiment_of_parts
from experiments.tuner import drift, searches

EXPERIMENT = experiment_of_parts({"searches": searches.EXPERIMENT, "drift": drift.EXPERIMENT})
