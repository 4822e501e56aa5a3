"""Reference of error messages: those of the code, with the remedy that each one names.

A message has the form `problem: remedy`, where `…` stands for a value. Messages are found in the source, as
arguments of exceptions and rejections, also by way of a local variable. Those of internal errors are omitted.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import serve_app
from docs_reference.markdown import document, prose, table

_ROOT = Path(inspect.getfile(serve_app)).parent
_VALUE = "…"
# Classes whose messages clients and operators see; those of `ValueError` only in settings.
_SHOWN = frozenset(
    {
        *(
            "RequestRejected",
            "ForbiddenError",
            "EngineTimedOut",
            "BudgetExceeded",
            "Conclusion",
            "QueueRejection",
            "_Condition",
        ),
        *("SettingsError", "ServeAppError", "KeysFileError", "UnknownKeyError", "PortError", "StateError"),
        *("EngineError", "EndpointUnreachableError", "ApiError", "ApplicationError"),
        *("ArgumentTypeError", "TraceError", "RecordingError"),
    }
)
_CHECKS_SETTINGS = ("settings", "settings_base", "application")
_MIN_CHARACTERS = 12


class _Area(NamedTuple):
    """A section of the page, with the modules below `places`; the first area that matches counts."""

    title: str
    about: str
    places: tuple[str, ...]


_AREAS = (
    _Area(
        "Configuration, addresses and stores",
        "From `check`, `serve` and `deploy`, mostly behind the path of a setting.",
        (
            *("settings", "core/settings", "core/scaling", "serving/autoscaling", "serving/state"),
            "serving/gateway/settings",
        ),
    ),
    _Area(
        "Answers to requests",
        "In the field `message` of an error. [Outcomes](outcomes.md) has the statuses and codes.",
        ("serving/gateway", "core"),
    ),
    _Area(
        "Engines and endpoints",
        "At a start, in `status` and the logs of replicas and watchers.",
        ("engines", "serving"),
    ),
    _Area("Commands", "From `ewsjf`, which then exits with 1 or 2.", ("",)),
)


class Message(NamedTuple):
    """A message template; the remedy is empty if it names none."""

    problem: str
    remedy: str


def messages_page() -> str:
    """Render the page."""
    found: dict[str, set[Message]] = {area.title: set() for area in _AREAS}
    for path in sorted(_ROOT.rglob("*.py")):
        place = path.relative_to(_ROOT).with_suffix("").as_posix()
        area = next(area for area in _AREAS if place.startswith(area.places))
        checks_settings = path.stem in _CHECKS_SETTINGS or place.startswith("settings/")
        found[area.title].update(messages_of(path.read_text(), checks_settings=checks_settings))
    about = (
        f"Search this page for a part of a message; {_VALUE} stands for a value. Messages without a second "
        "column say themselves what to do, or have another program's reason. "
        "[Troubleshooting](../troubleshooting.md) begins with symptoms."
    )
    parts = ["# Error messages", about]
    for area in _AREAS:
        rows = [tuple(map(prose, message)) for message in sorted(found[area.title], key=_order)]
        parts += [f"## {area.title}", area.about, table(("Message", "What to do"), rows)]
    return document(*parts)


def messages_of(source: str, *, checks_settings: bool = False) -> Iterator[Message]:
    """Yield the messages in the source of a module."""
    tree = ast.parse(source)
    of_settings = [
        function
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef) and any(map(_is_settings, kind.decorator_list))
        for function in kind.body
    ]
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            shown = {*_SHOWN, "ValueError"} if checks_settings or scope in of_settings else _SHOWN
            texts = _local_texts(scope)
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and _name(node.func) in shown:
                    yield from (message for argument in node.args for message in _messages(argument, texts))


def _is_settings(decorator: ast.expr) -> bool:
    return _name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "settings"


def _order(message: Message) -> tuple[str, Message]:
    return message.problem.lstrip(f"{_VALUE} :.,'`").lower(), message


def _messages(argument: ast.expr, texts: Mapping[str, list[str]]) -> Iterator[Message]:
    found = texts.get(argument.id, []) if isinstance(argument, ast.Name) else [_text(argument)]
    for text in found:
        if text is not None and len(text) >= _MIN_CHARACTERS and " " in text:
            problem, _, remedy = ("", "", "") if "{" in text else text.partition(": ")
            # Another program's reason is no remedy, and an example has colons of its own.
            has_remedy = not remedy.startswith(_VALUE) and min(len(problem), len(remedy)) >= _MIN_CHARACTERS
            yield Message(problem, remedy) if has_remedy else Message(text, "")


def _local_texts(scope: ast.AST) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _text(node.value)
            if text is not None:
                found.setdefault(node.targets[0].id, []).append(text)
    return found


def _text(node: ast.expr) -> str | None:
    """Return a text with placeholders; None if it is something else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(each.value) if isinstance(each, ast.Constant) else _VALUE for each in values)
        case _:
            return None


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
