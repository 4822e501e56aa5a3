"""Snapshots: learned state as msgspec structs, and their decoder.

A class that learns is such a struct, or has two methods. `state()` returns everything learned as a struct
that later events do not change, and `restore(state)` restores it. `decoded` checks all values before any is
restored, because a file may be damaged or old.
"""

import sys
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

Kind = TypeVar("Kind")

# The bounds exclude infinities and NaN, and integers that msgspec cannot encode.
MOST = sys.float_info.max
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def encoded(state: object) -> dict[str, Any]:
    """Return a state as plain values that JSON can hold."""
    document: dict[str, Any] = msgspec.to_builtins(state, str_keys=True)
    return document


def decoded(document: object, kind: type[Kind]) -> Kind:
    """Return the state that a document holds.

    Raises:
        ValueError: a value is missing or out of range; the message has its path.
    """
    try:
        return msgspec.convert(document, kind, str_keys=True)
    except msgspec.ValidationError as exc:
        raise ValueError(f"learned state: {exc}; delete the state") from exc
