"""The command `python -m serve_app simulate`, with length queues learned as the tuner learns them.

`ewsjf-paper` gets the queues that are published with it.
"""

from serve_app.simulation.command import simulate_command
from serve_app.tuning.refine_and_prune import PAPER
from serve_app.tuning.strategic_loop import LearnedPartitions, StrategicSettings

_PUBLISHED = {"ewsjf-paper": StrategicSettings(refine_and_prune=PAPER)}
COMMAND = simulate_command(LearnedPartitions(by_policy=_PUBLISHED))
