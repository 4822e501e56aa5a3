"""The decision log: every event of a scheduler, with its time and the resulting commands.

Each line is one JSON value. A run starts with a header, an object with the scheduler's complete initial
state, so that the same events, fed to a new scheduler, must give the same commands (`replay`). A decision is
an array: time, name of the event, the event, and the commands, each with its name. Live and simulated
schedulers write the same lines: the same inputs give the same bytes. The JSON dialect is Python's: infinite
times are `Infinity`.
"""

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from serve_app.core.commands import Command
from serve_app.core.events import Event, Message
from serve_app.core.learned_state import restore_state
from serve_app.core.policies import POLICIES, MakePolicy
from serve_app.core.scheduler import Scheduler
from serve_app.core.settings import SchedulerSettings
from serve_app.errors import ServeAppError


class DecisionLogError(ServeAppError):
    """A decision log cannot be read or replayed. The message names the line and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The initial state of a scheduler.

    Attributes:
        learned: learned state of an earlier scheduler, see `learned_state`; None for none.
        run: labels of the run for readers (label, seed, incarnation).
    """

    settings: SchedulerSettings
    now: float = 0.0
    learned: Mapping[str, Any] | None = None
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """One call of the scheduler: time, event, and resulting commands."""

    now: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run read from a log, with the line number of each decision."""

    header: RunHeader
    decisions: list[tuple[int, Decision]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision of a replay that differs from the logged one."""

    line: int
    logged: Decision
    replayed: tuple[Command, ...]

    def __str__(self) -> str:
        return (
            f"line {self.line}: at {self.logged.now!r} after {type(self.logged.event).__name__} the log has "
            f"{_shown(self.logged.commands)}, the replay {_shown(self.replayed)}"
        )


def encode_header(header: RunHeader) -> str:
    """Return the line that starts a run."""
    return _dumps(msgspec.to_builtins(header))


def encode_decision(decision: Decision) -> str:
    """Return the line of one decision."""
    event, commands = decision.event, decision.commands
    named = [[type(command).__name__, msgspec.to_builtins(command)] for command in commands]
    # With names even for those that are arrays on the control channel.
    content = {name: msgspec.to_builtins(getattr(event, name)) for name in event.__struct_fields__}
    return _dumps([decision.now, type(event).__name__, _reduced(content), named])


def encode_end(reason: str) -> str:
    """Return the line that ends a run before its scheduler ends."""
    return _dumps({"ended": reason})


def read_runs(lines: Iterable[str]) -> Iterator[LoggedRun]:
    """Yield the runs of a log, in order.

    Raises:
        DecisionLogError: a line is not a header, decision or end of this format.
    """
    run: LoggedRun | None = None
    for number, text in enumerate(lines, start=1):
        line = _loads(text, number)
        if isinstance(line, dict) and "settings" in line:
            if run is not None:
                yield run
            run = LoggedRun(_converted(line, RunHeader, number), [])
        elif isinstance(line, list) and run is not None:
            run.decisions.append((number, _decision(line, number)))
        elif not (isinstance(line, dict) and "ended" in line):
            raise DecisionLogError(f"line {number} is neither a header nor a decision of a run")
    if run is not None:
        yield run


def replay(
    run: LoggedRun,
    policies: Mapping[str, MakePolicy] = POLICIES,
    on_decision: Callable[[], object] = lambda: None,
) -> Difference | None:
    """Feed a run's events to a new scheduler. Return the first decision that differs, or None.

    Args:
        on_decision: called after each equal decision.
    """
    header = run.header
    scheduler = Scheduler(header.settings, now=header.now, policies=policies)
    if header.learned is not None:
        restore_state(scheduler, header.learned)
    for number, logged in run.decisions:
        commands = tuple(scheduler.handle(logged.event, logged.now))
        if commands != logged.commands:
            return Difference(number, logged, commands)
        on_decision()
    return None


def _reduced(event: dict[str, Any]) -> dict[str, Any]:
    """Remove what no decision depends on, and what few requests have, so that other logs do not grow."""
    event.pop("times", None)
    if not event.get("seen_tokens"):
        event.pop("seen_tokens", None)
    if (request := event.get("request")) is not None:
        del request["client_request_id"], request["grants"]
    for part, name in (
        ((event.get("request") or {}).get("submission"), "program"),
        (event.get("usage"), "ending"),
    ):
        if part and part[name] is None:
            del part[name]
    return event


def _by_name(union: Any) -> dict[str, type]:
    assert isinstance(union, types.UnionType)
    return {kind.__name__: kind for kind in get_args(union)}


_EVENTS = _by_name(Event)
_COMMANDS = _by_name(Command)


def _decision(line: list[Any], number: int) -> Decision:
    try:
        now, name, event, commands = line
        return Decision(
            float(now),
            _event(event, _EVENTS[name], number),
            tuple(_converted(command, _COMMANDS[kind], number) for kind, command in commands),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise DecisionLogError(f"line {number} is not a decision of this version: {exc!r}") from exc


def _event(content: Any, kind: type, number: int) -> Any:
    if issubclass(kind, Message):
        names, defaults = kind.__struct_fields__, kind.__struct_defaults__
        known = dict(zip(reversed(names), reversed(defaults), strict=False)) | content
        fields = (known[name] for name in names)
        content = [kind.__struct_config__.tag, *fields]
    return _converted(content, kind, number)


def _converted(content: Any, kind: Any, number: int) -> Any:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as exc:
        name = kind.__name__
        raise DecisionLogError(f"line {number} is not a valid {name} of this version: {exc}") from exc


def _loads(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise DecisionLogError(f"line {number} is not JSON: {exc}") from exc


def _dumps(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _shown(commands: tuple[Command, ...]) -> str:
    return ", ".join(map(repr, commands)) or "no command"
