"""The decision log file of a live scheduler: bounded, in the format of `scheduling.decision_log`."""

import contextlib
import logging
from pathlib import Path
from typing import Annotated

from serve_app.scheduling.decision_log import (
    Decision,
    RunHeader,
    encode_decision,
    encode_end,
    encode_header,
)
from serve_app.settings_base import ADVANCED, at_least, settings

logger = logging.getLogger("ray.serve")


@settings(block="decision_log")
class DecisionLogSettings:
    """Where decisions are recorded, and how many.

    Attributes:
        path: the file; `{incarnation}` in it is replaced, so that a new scheduler writes a new one.
    """

    path: str
    # About 600 bytes an event, four events a request: some 600 MB at the most.
    max_events: Annotated[int, at_least(1), ADVANCED] = 1_000_000


class DecisionLogFile:
    """Writes decisions to a file, buffered; `close` ends it.

    Attributes:
        ended: why nothing is recorded any more; empty while something is.

    It ends after `max_events` with a line that says so; a replay needs its beginning, so that stays.
    """

    def __init__(self, path: Path, max_events: int, header: RunHeader) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._left = max_events
        self.ended = ""
        self._write(encode_header(header))

    def add(self, decision: Decision) -> None:
        """Record one decision."""
        if self._left > 0:
            self._left -= 1
            self._write(encode_decision(decision))
            if self._left == 0:
                self.ended = "max_events reached"
                self._write(encode_end(self.ended))
                self._file.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()

    def close(self) -> None:
        """Write what is buffered, and end the file."""
        self._left = 0
        self._file.close()

    def _write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
        except OSError as error:
            # A full disk must not stop the scheduler.
            self._left = 0
            self.ended = str(error)
            logger.warning("event=decision_log_ended path=%s reason=%r", self._file.name, error)
