"""Tells what is wrong in a settings file in the file's own words: full path, value, remedy."""

import dataclasses
import difflib
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from serve_app.errors import SettingsError


def settings_error(failure: ValidationError, root: type[BaseModel]) -> SettingsError:
    """All that pydantic found, one line each; `root` is the class at the top of the file."""
    return SettingsError("\n".join(_explain(error, root) for error in failure.errors()))


def _explain(error: ErrorDetails, root: type[BaseModel]) -> str:
    where = _path(error["loc"])
    if error["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        key = str(error["loc"][-1])
        near = difflib.get_close_matches(key, _known_keys(root, error["loc"][:-1]), n=1)
        return f"{where}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"].startswith("missing"):
        return f"{where}: is missing"
    if error["type"] == "value_error":
        return f"{where}: {error['ctx']['error']}"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return path.lstrip(".") or "args"


def _known_keys(root: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that may stand at a place in the file."""
    kind: Any = root
    for step in loc:
        kind = _inside(kind, step)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return [entry.name for entry in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _inside(kind: Any, step: int | str) -> Any:
    """The class of the settings at one step further down the path, None when there is none."""
    if isinstance(step, int):
        members: tuple[Any, ...] = typing.get_args(kind)
        return members[0] if members else None
    if not isinstance(kind, type):
        return None
    inner = typing.get_type_hints(kind).get(step)
    if isinstance(inner, types.UnionType) or typing.get_origin(inner) is typing.Union:
        return next((arm for arm in typing.get_args(inner) if dataclasses.is_dataclass(arm)), None)
    return inner
