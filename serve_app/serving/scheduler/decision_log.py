"""The decision log: every event with its time and the commands that answered it, one JSON line each.

The first line holds the scheduler's settings and the time at which it began, so that a replay starts from the
same state. JSON here is Python's: infinite times are written as `Infinity`. The log ends after `max_events`
with a line that says so; its beginning is what a replay needs, so it is never cut at that end.
"""

import dataclasses
import json
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import msgspec

from serve_app.scheduling.commands import Command
from serve_app.scheduling.events import Event

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLogSettings:
    """Where decisions are recorded, and how many.

    Attributes:
        path: the file; `{incarnation}` in it is replaced, so that a new scheduler writes a new one.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: str
    # About 600 bytes an event, four events a request: some 600 MB at the most.
    max_events: int = 1_000_000

    def __post_init__(self) -> None:
        if self.max_events < 1:
            raise ValueError(f"decision_log.max_events must be at least 1, got {self.max_events}")


@dataclass(frozen=True, slots=True)
class Decision:
    """One step of the core."""

    now: float
    event: Event
    commands: list[Command]


def _by_name(union: Any) -> dict[str, type]:
    assert isinstance(union, types.UnionType)
    return {kind.__name__: kind for kind in get_args(union)}


_EVENTS = _by_name(Event)
_COMMANDS = _by_name(Command)


class DecisionLog:
    """Writes decisions to a file, buffered; `close` ends it."""

    def __init__(self, path: Path, max_events: int, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._left = max_events
        self._write(header)

    def add(self, now: float, event: Event, commands: list[Command]) -> None:
        """Record one step."""
        if self._left > 0:
            self._left -= 1
            named = [[type(command).__name__, _plain(command)] for command in commands]
            self._write([now, type(event).__name__, _plain(event), named])
            if self._left == 0:
                self._write({"ended": "max_events reached"})
                self._file.flush()

    def close(self) -> None:
        """Write what is buffered, and end the file."""
        self._left = 0
        self._file.close()

    def _write(self, line: Any) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            # A full disk must not stop the scheduler.
            self._left = 0
            logger.warning("event=decision_log_ended path=%s reason=%r", self._file.name, error)


def read_decisions(path: Path) -> tuple[dict[str, Any], Iterator[Decision]]:
    """Return the header of a log and its decisions in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header: dict[str, Any] = json.loads(lines[0])
    return header, (_decision(line) for line in map(json.loads, lines[1:]) if isinstance(line, list))


def _decision(line: list[Any]) -> Decision:
    now, name, event, commands = line
    return Decision(
        now,
        msgspec.convert(event, _EVENTS[name]),
        [msgspec.convert(command, _COMMANDS[kind]) for kind, command in commands],
    )


def _plain(value: Event | Command) -> Any:
    return msgspec.to_builtins(dataclasses.asdict(value))
