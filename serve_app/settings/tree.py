"""The tree of a settings file beside the classes that it is for: where each key belongs, and its full path.

A file gives an advanced setting under `advanced` in its block, while the class has all settings side by side.
"""

import difflib
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from serve_app.settings_base import ADVANCED, Setting, block_of, describe

_ADVANCED = ADVANCED.value


class _Entry(NamedTuple):
    """One key of a file, with its full path."""

    path: str
    key: Any
    value: Any
    is_advanced: bool


class TreeReader:
    """Lays the tree of a file out as its classes want it, and notes every key that stands in a wrong place.

    Args:
        extended: for a class of written settings the class that completes it; what only that one has is
            refused in a file.

    Attributes:
        faults: what is wrong, one line each.
    """

    def __init__(self, extended: Mapping[type, type]) -> None:
        self._extended = extended
        self.faults: list[str] = []

    def laid_out(self, value: Any, kind: Any, path: str = "") -> Any:
        """The value as its type wants it; one of another shape stays as it is, for the parser to refuse."""
        block = block_of(kind)
        if block is not None and value is None and block is kind:
            # A key with nothing behind it: all defaults.
            return {}
        if block is not None and isinstance(value, Mapping):
            return self._block(value, block, path)
        if isinstance(value, list | tuple):
            inner = _inside(kind, 0)
            return [self.laid_out(each, inner, f"{path}[{number}]") for number, each in enumerate(value)]
        return value

    def _block(self, given: Mapping[Any, Any], block: type, path: str) -> dict[str, Any]:
        known = _settings(block)
        found = {}
        for entry in self._entries(given, block, path):
            setting = known.get(entry.key)
            if setting is None:
                self.faults.append(f"{entry.path}{self._unknown(entry, block)}")
            elif setting.is_advanced is not entry.is_advanced:
                self.faults.append(_misplaced(entry, path))
            else:
                found[setting.name] = self.laid_out(entry.value, setting.kind, entry.path)
        return found

    def _entries(self, given: Mapping[Any, Any], block: type, path: str) -> Iterator[_Entry]:
        has_advanced = any(setting.is_advanced for setting in _settings(block).values())
        for key, value in given.items():
            here = _joined(path, key)
            if key != _ADVANCED or not has_advanced:
                yield _Entry(here, key, value, is_advanced=False)
            elif isinstance(value, Mapping):
                for inner, setting in value.items():
                    yield _Entry(_joined(here, inner), inner, setting, is_advanced=True)
            elif value is not None:
                self.faults.append(f"{here} must hold settings, got {value!r}")

    def _unknown(self, entry: _Entry, block: type) -> str:
        if block in self._extended and entry.key in _settings(self._extended[block]):
            return " is not given here: it follows from models"
        known = _settings(block)
        near = difflib.get_close_matches(str(entry.key), known, n=1)
        if not near:
            return ": unknown key"
        elsewhere = known[near[0]].is_advanced and not entry.is_advanced
        return f": unknown key; did you mean {f'{_ADVANCED}.' if elsewhere else ''}{near[0]}?"


def path_of(steps: tuple[int | str, ...], root: type) -> str:
    """The full path of a setting in a file.

    Args:
        steps: names of settings and numbers in lists, from the top down, without `advanced`. Steps below a
            value that is no block, list or mapping are left out.
        root: the class at the top.
    """
    path, kind = "", root
    for step in steps:
        block = block_of(kind)
        if block is not None and step in _settings(block) and _settings(block)[str(step)].is_advanced:
            path = _joined(path, _ADVANCED)
        elif block is None and typing.get_origin(kind) not in {tuple, list, Mapping}:
            break
        path = f"{path}[{step}]" if isinstance(step, int) else _joined(path, step)
        kind = _inside(kind, step)
    return path


def _inside(kind: Any, step: int | str) -> Any:
    """The type of what lies one step further down, None where nothing is known of it."""
    block = block_of(kind)
    if block is not None:
        setting = _settings(block).get(str(step))
        return setting.kind if setting is not None else None
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in {tuple, list}:
        return inner[0]
    return inner[1] if typing.get_origin(kind) is Mapping else None


def _misplaced(entry: _Entry, path: str) -> str:
    if entry.is_advanced:
        return f"{entry.path} is no advanced setting: write it as {_joined(path, entry.key)}"
    return f"{entry.path} is an advanced setting: write it as {_joined(_joined(path, _ADVANCED), entry.key)}"


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


@cache
def _settings(block: type) -> dict[str, Setting]:
    return {setting.name: setting for setting in describe(block)}
