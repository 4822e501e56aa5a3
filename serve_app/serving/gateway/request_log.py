"""The log of concluded requests: lines that are written together, a few times a second.

A line by itself costs a gateway about as much as all the rest of a small request: a record, a search for its
caller, a look whether the file is full, a write. Together, lines share all of that, and the time that stands
before them, which is that of the writing. A process that is killed loses the lines of the last moment.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from logging.handlers import MemoryHandler, RotatingFileHandler
from typing import TextIO

_INTERVAL_S = 0.2
# So many lines are not kept any longer.
_MOST_LINES = 1_000
# Where a line goes in what a handler's format makes of one record; no line contains it.
_PLACE = "\x00"
# Others may do with a record what they like.
_PLAIN_HANDLERS = (logging.StreamHandler, logging.FileHandler, RotatingFileHandler)


class RequestLog:
    """Lines on their way to a logger's handlers, in order."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: str) -> None:
        """Have a line written soon; on the event loop."""
        self._lines.append(line)
        if len(self._lines) >= _MOST_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Write all lines now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if not lines or not self._logger.isEnabledFor(logging.INFO):
            return
        logger = self._logger
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, _PLACE, (), None)
        for handler in _handlers(logger):
            _write(handler, record, lines)


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """Those that a logger's records go to."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _write(handler: logging.Handler, record: logging.LogRecord, lines: Sequence[str]) -> None:
    if record.levelno < handler.level:
        return
    if isinstance(handler, MemoryHandler) and handler.target is not None:
        if handler.filter(record):
            # What it keeps came before.
            handler.flush()
            _write(handler.target, record, lines)
    elif isinstance(handler, logging.StreamHandler) and _is_plain(handler):
        _write_together(handler, record, lines)
    else:
        for line in lines:
            handler.handle(logging.makeLogRecord({**record.__dict__, "msg": line}))


def _is_plain(handler: "logging.StreamHandler[TextIO]") -> bool:
    """Whether it does with a record what the standard library's does; a file is opened by the first one."""
    return type(handler) in _PLAIN_HANDLERS and handler.stream is not None


def _write_together(
    handler: "logging.StreamHandler[TextIO]", record: logging.LogRecord, lines: Sequence[str]
) -> None:
    if not handler.filter(record):
        return
    handler.acquire()
    try:
        if isinstance(handler, RotatingFileHandler) and handler.shouldRollover(record):
            handler.doRollover()
        stream: TextIO = handler.stream
        stream.write(_formatted(handler.format(record), lines, handler.terminator))
        handler.flush()
    except Exception:  # noqa: BLE001 - as handlers do
        handler.handleError(record)
    finally:
        handler.release()


def _formatted(made: str, lines: Sequence[str], terminator: str) -> str:
    """Each line as the one record was formatted, which may be a JSON document."""
    place = json.dumps(_PLACE)[1:-1]
    if place in made:
        before, _, after = made.partition(place)
        return "".join([f"{before}{json.dumps(line)[1:-1]}{after}{terminator}" for line in lines])
    before, _, after = made.partition(_PLACE)
    return "".join([f"{before}{line}{after}{terminator}" for line in lines])
