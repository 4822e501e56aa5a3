"""The `@settings` decorator, and the ranges and marks that stand in the annotations of settings.

    @settings(block="promotion")
    class PromotionSettings:
        batch_s: Annotated[float, POSITIVE] = 1_800.0
        promoted_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.2

A class of settings is a frozen dataclass with keyword arguments only, and a parser refuses keys that it does
not have. Every value is compared with its range whenever an object is made, from a file or in Python.
Checks that concern two settings stand in the class's own `__post_init__`, which runs after the ranges.
"""

import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, overload

from serve_app.errors import SettingsError

Settings = TypeVar("Settings")


class Audience(enum.Enum):
    """For whom a setting is; one without a mark is for every user."""

    ADVANCED = "advanced"


ADVANCED = Audience.ADVANCED
"""Marks a setting whose default suits nearly everybody; a file gives it under `advanced` in its block."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may have, both ends included. None, where the type allows it, is in range.

    Attributes:
        words: what a message says of a value outside, such as `must be positive`.
        remedy: what else it says, after the value and a colon.
    """

    low: float
    high: float
    words: str
    remedy: str = ""

    def hint(self, remedy: str) -> "Range":
        """The same range, with a remedy in its message."""
        return replace(self, remedy=f": {remedy}")


def _after(value: float) -> float:
    return math.nextafter(value, math.inf)


def _before(value: float) -> float:
    return math.nextafter(value, -math.inf)


_LARGEST = _before(math.inf)

POSITIVE = Range(_after(0), math.inf, "must be positive")
FINITE_POSITIVE = Range(_after(0), _LARGEST, "must be a positive number")
NOT_NEGATIVE = Range(0, math.inf, "must not be negative")
FINITE_NOT_NEGATIVE = Range(0, _LARGEST, "must be a number, 0 or more")
SHARE = Range(0, 1, "must be from 0 to 1")
POSITIVE_SHARE = Range(_after(0), 1, "must be above 0 and at most 1")
INNER_SHARE = Range(_after(0), _before(1), "must be above 0 and below 1")


def at_least(low: float) -> Range:
    """Numbers from `low` on."""
    return Range(low, math.inf, f"must be at least {low:,}")


def above(low: float) -> Range:
    """Numbers greater than `low`."""
    return Range(_after(low), math.inf, f"must be greater than {low:,}")


def share_below(high: float) -> Range:
    """Shares from 0 on that do not reach `high`."""
    return Range(0, _before(high), f"must be at least 0 and below {high}")


def between(low: float, high: float) -> Range:
    """Numbers from `low` to `high`."""
    return Range(low, high, f"must be from {low:,} to {high:,}")


class OutOfRangeError(SettingsError):
    """One setting has a value outside its range.

    Attributes:
        name: of the setting in its class.
        reason: what is wrong with the value, without that name.
    """

    def __init__(self, block: str, name: str, reason: str) -> None:
        super().__init__(f"{block}.{name} {reason}" if block else f"{name} {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a class says of one of its settings.

    Attributes:
        kind: its type, without marks and ranges.
        default: `dataclasses.MISSING` when it has none.
        allowed: its range, if it has one.
        is_advanced: whether files give it under `advanced`.
    """

    name: str
    kind: Any
    default: object
    allowed: Range | None
    is_advanced: bool


def describe(cls: type) -> tuple[Setting, ...]:
    """The settings of a class that `settings` made, in the order of their declaration."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_described(each, hints[each.name]) for each in fields(cls))


def block_of(kind: Any) -> type | None:
    """The class of settings that a setting of this type holds, None when it holds a plain value."""
    arms = typing.get_args(kind) if _is_union(kind) else (kind,)
    blocks = (arm for arm in map(_plain, arms) if isinstance(arm, type) and is_dataclass(arm))
    return next(blocks, None)


def as_written(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a file gives them: the advanced ones under `advanced` in their block.

    Args:
        cls: the class of the block that they belong to.
        values: by name; those of a block inside it are a mapping again.

    Raises:
        SettingsError: there is no such setting.
    """
    usual: dict[str, Any] = {}
    advanced: dict[str, Any] = {}
    known = {setting.name: setting for setting in describe(cls)}
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{cls.__name__} has no setting {name}")
        block = block_of(known[name].kind)
        given = as_written(block, value) if block is not None and isinstance(value, Mapping) else value
        (advanced if known[name].is_advanced else usual)[name] = given
    return usual | ({ADVANCED.value: advanced} if advanced else {})


@overload
def settings(cls: type[Settings], /) -> type[Settings]: ...


@overload
def settings(*, block: str = "") -> Callable[[type[Settings]], type[Settings]]: ...


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(
    cls: type[Settings] | None = None, /, *, block: str = ""
) -> type[Settings] | Callable[[type[Settings]], type[Settings]]:
    """Make a class of settings out of annotations and defaults.

    Args:
        cls: the class, when the decorator stands without parentheses.
        block: name of the block in files, which messages put before the setting's own.
    """
    return _made(cls, block) if cls is not None else lambda given: _made(given, block)


def _made(cls: type[Settings], block: str) -> type[Settings]:
    annotations = vars(cls).get("__annotations__", {})
    ranges = [(name, allowed) for name, kind in annotations.items() if (allowed := _range(kind))]
    limits = [(name, allowed.low, allowed.high, allowed) for name, allowed in ranges]
    choices = [(name, known) for name, kind in annotations.items() if (known := _choices(kind))]
    own = vars(cls).get("__post_init__")
    inherited = next((base.__post_init__ for base in cls.__mro__[1:] if hasattr(base, "__post_init__")), None)

    def check(self: Settings) -> None:
        if inherited is not None:
            inherited(self)
        for name, low, high, allowed in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OutOfRangeError(block, name, f"{allowed.words}, got {value}{allowed.remedy}")
        for name, known in choices:
            if getattr(self, name) not in known:
                reason = f"must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                raise OutOfRangeError(block, name, reason)
        if own is not None:
            own(self)

    # Before the dataclass is made: one with slots is a copy of this class.
    for name, value in (("__post_init__", check), ("__pydantic_config__", {"extra": "forbid"})):
        setattr(cls, name, value)
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


def _described(declared: "Field[Any]", kind: Any) -> Setting:
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    return Setting(
        name=declared.name,
        kind=_plain(kind),
        default=default,
        allowed=_range(kind),
        is_advanced=ADVANCED in _marks(kind),
    )


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in {typing.Union, types.UnionType}


def _marks(kind: Any) -> tuple[Any, ...]:
    return kind.__metadata__ if typing.get_origin(kind) is Annotated else ()


def _plain(kind: Any) -> Any:
    return kind.__origin__ if typing.get_origin(kind) is Annotated else kind


def _range(kind: Any) -> Range | None:
    return next((mark for mark in _marks(kind) if isinstance(mark, Range)), None)


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(_plain(kind)) if typing.get_origin(_plain(kind)) is Literal else ()
