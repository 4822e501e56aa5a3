"""Snapshots: learned state as plain values, and readers that validate it.

A class that learns has two methods. `state()` returns everything learned as values that JSON can hold, and
`restore(state)` restores it. `restore` raises `ValueError` if a value is missing or out of range, and changes
nothing then. The functions of this module raise it, too, because a file may be damaged or old.
"""

import math
from collections.abc import Mapping

Snapshot = Mapping[str, object]


def section(state: Snapshot, name: str) -> Snapshot:
    """Return the dictionary under `name`."""
    value = state.get(name)
    if isinstance(value, Mapping):
        return value
    raise _malformed(name, "a dictionary", value)


def sections(state: Snapshot, name: str) -> list[Snapshot]:
    """Return the list of dictionaries under `name`."""
    value = state.get(name)
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return value
    raise _malformed(name, "a list of dictionaries", value)


def number(state: Snapshot, name: str, *, at_least: float = -math.inf, at_most: float = math.inf) -> float:
    """Return the finite number under `name`."""
    value = state.get(name)
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and at_least <= value <= at_most
        and -math.inf < value < math.inf
    ):
        return float(value)
    raise _malformed(
        name, "a finite number" if at_least == -math.inf else f"a number from {at_least:g}", value
    )


def numbers(state: Snapshot, name: str, count: int, *, at_least: float = -math.inf) -> list[float]:
    """Return the list of `count` finite numbers under `name`."""
    value = state.get(name)
    if isinstance(value, list) and len(value) == count:
        return [number({name: item}, name, at_least=at_least) for item in value]
    raise _malformed(name, f"a list of {count} numbers", value)


def text(state: Snapshot, name: str) -> str:
    """Return the text under `name`."""
    value = state.get(name)
    if isinstance(value, str):
        return value
    raise _malformed(name, "a string", value)


def check_version(state: Snapshot, expected: int) -> None:
    """Raise `ValueError` if the `version` of a state differs from the one that this release writes."""
    version = number(state, "version")
    if version != expected:
        raise ValueError(f"learned state has version {version:g}, this release reads {expected}; delete it")


def _malformed(name: str, expected: str, value: object) -> ValueError:
    return ValueError(
        f"learned state: {name!r} must be {expected}, got {str(value)[:80]!r}; delete the state"
    )
