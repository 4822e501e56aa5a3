"""The command `python -m serve_app simulate`, with length queues learned as the tuner learns them."""

from serve_app.simulation.command.command import simulate_command
from serve_app.tuning.partition.strategic_loop import LearnedPartitions

COMMAND = simulate_command(LearnedPartitions())
