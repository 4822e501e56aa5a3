"""Every decision of the scheduler, one JSON line each: what happened, when, and what it wanted done.

Same inputs, same bytes. Each run begins with a line that names its policy and seed. Infinite times are null.
"""

from typing import BinaryIO

import msgspec

from serve_app.simulation.run import RunSettings
from serve_app.simulation.simulation import Decision


class DecisionLog:
    """Writes decisions to an open file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def begin(self, settings: RunSettings) -> None:
        """Head the decisions of a run."""
        self._line({"run": {"policy": settings.policy, "label": settings.name, "seed": settings.seed}})

    def add(self, decision: Decision) -> None:
        """Write one decision."""
        self._line(
            {
                "at": decision.at,
                "event": {type(decision.event).__name__: decision.event},
                "commands": [{type(command).__name__: command} for command in decision.commands],
            }
        )

    def _line(self, content: dict[str, object]) -> None:
        self._file.write(msgspec.json.encode(content) + b"\n")
