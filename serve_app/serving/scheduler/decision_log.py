"""The decision log file of a live scheduler: bounded, in the format of `core.decision_log`."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TextIO

from serve_app.core.decision_log import Decision, RunHeader, encode_decision, encode_end, encode_header
from serve_app.core.settings_base import ADVANCED, at_least, settings
from serve_app.serving.scheduler.journal import Entry

logger = logging.getLogger("ray.serve")


@settings(block="decision_log")
class DecisionLogSettings:
    """File and length of the decision log.

    Attributes:
        path: the file; `{incarnation}` is replaced, so that each scheduler writes its own.
    """

    path: str
    # About 600 bytes per event and four events per request: at most about 600 MB.
    max_events: Annotated[int, at_least(1), ADVANCED] = 1_000_000


class DecisionLogFile:
    """Buffered file of decisions.

    After `max_events` it ends with a line that says so; the beginning is retained, because a replay needs it.
    It also ends on errors of the file system, such as a full disk, which must not stop the scheduler.

    Attributes:
        end_reason: why recording has ended; empty while it is active.
    """

    def __init__(self, path: Path, max_events: int, header: RunHeader) -> None:
        self._path = path
        self._left = max_events
        self._file: TextIO | None = None
        self.end_reason = ""
        with self._ending_on_error():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        self._write(encode_header(header))

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of every event."""
        return {Entry: self._record}

    def _record(self, entry: Entry) -> None:
        if self._file is None:
            return
        self._write(encode_decision(Decision(entry.now, entry.event, tuple(entry.commands))))
        self._left -= 1
        if self._left == 0 and not self.end_reason:
            self.end_reason = "max_events reached"
            self._write(encode_end(self.end_reason))
            self.close()

    def flush(self) -> None:
        """Write buffered lines."""
        with self._ending_on_error():
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Write buffered lines, and close the file."""
        file, self._file = self._file, None
        with self._ending_on_error():
            if file is not None:
                file.close()

    def _write(self, line: str) -> None:
        with self._ending_on_error():
            if self._file is not None:
                self._file.write(line + "\n")

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            self.end_reason = str(error)
            logger.warning("event=decision_log_ended path=%s reason=%r", self._path, error)
            with contextlib.suppress(OSError):
                # Closing retries the buffered write, and closes the file in any case.
                if file is not None:
                    file.close()
