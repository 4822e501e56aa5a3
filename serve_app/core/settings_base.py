"""Settings: the `@settings` decorator, ranges and marks in annotations, and the reader of plain values.

    @settings(block="promotion")
    class PromotionSettings:
        batch_s: Annotated[float, POSITIVE] = 1_800.0
        promoted_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.2

A settings class is a frozen dataclass with keyword arguments only. Every value is checked against its range
when an object is created, from a file or in Python. Checks that involve two settings are in the class's
`__post_init__`, which runs after the range checks. `read` creates settings from the values of a file, and
reports all errors at once, each with its full path.

A setting has one of three audiences. Settings without a mark are for every user. `ADVANCED` ones are under
`advanced` in their block of a file. `INTERNAL` ones are in no file and no reference: they are for code that
creates settings in Python (experiments, ablations, tests that shorten a time) and for `simulate --set`. A
value that never needs to change is a constant in the code.

A setting whose name is a keyword of Python has an underscore there: `class_` is `class` in files.
"""

import difflib
import enum
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from keyword import iskeyword
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform, overload

from serve_app.errors import SettingsError

Settings = TypeVar("Settings")


class Audience(enum.Enum):
    """Audience of a setting; one without a mark is for every user."""

    ADVANCED = "advanced"
    INTERNAL = "internal"


ADVANCED = Audience.ADVANCED
"""Marks a setting whose default suits almost all users; a file contains it under `advanced` in its block."""
INTERNAL = Audience.INTERNAL
"""Marks a setting, or a block of settings, that is set only in Python."""


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed numbers of a setting, both ends included. None, if the type allows it, is in range.

    Attributes:
        words: the message for a value outside, such as `must be positive`.
        remedy: appended to the message after the value, with a colon.
    """

    low: float
    high: float
    words: str
    remedy: str = ""

    def hint(self, remedy: str) -> "Range":
        """Return the same range with a remedy in its message."""
        return replace(self, remedy=f": {remedy}")

    def violation(self, value: object) -> str:
        """Return the end of a message about a value outside, after the name of the setting."""
        return f"{self.words}, got {value}{self.remedy}"


def _after(value: float) -> float:
    return math.nextafter(value, math.inf)


def _before(value: float) -> float:
    return math.nextafter(value, -math.inf)


_LARGEST = _before(math.inf)

FINITE = Range(-_LARGEST, _LARGEST, "must be a number")
POSITIVE = Range(_after(0), math.inf, "must be positive")
FINITE_POSITIVE = Range(_after(0), _LARGEST, "must be a positive number")
NOT_NEGATIVE = Range(0, math.inf, "must not be negative")
FINITE_NOT_NEGATIVE = Range(0, _LARGEST, "must be a number, 0 or more")
SHARE = Range(0, 1, "must be from 0 to 1")
POSITIVE_SHARE = Range(_after(0), 1, "must be above 0 and at most 1")
INNER_SHARE = Range(_after(0), _before(1), "must be above 0 and below 1")


def at_least(low: float) -> Range:
    """Return the range of numbers from `low`."""
    return Range(low, math.inf, f"must be at least {low:,}")


def share_below(high: float) -> Range:
    """Return the range of shares from 0 to below `high`."""
    return Range(0, _before(high), f"must be at least 0 and below {high}")


def between(low: float, high: float) -> Range:
    """Return the range of numbers from `low` to `high`."""
    return Range(low, high, f"must be from {low:,} to {high:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The description of one setting of a class.

    Attributes:
        default: its default; `dataclasses.MISSING` if it has none.
        is_advanced: whether files contain it under `advanced`.
        is_internal: whether files cannot contain it.
    """

    name: str
    kind: Any
    default: object
    allowed: Range | None
    is_advanced: bool
    is_internal: bool


@cache
def describe(cls: type) -> tuple[Setting, ...]:
    """Return the settings of a settings class, in the order of their declaration."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_described(each, hints[each.name]) for each in fields(cls))


def in_files(cls: type) -> dict[str, Setting]:
    """Return the settings of a class that files may contain, by name."""
    return {each.name: each for each in describe(cls) if not each.is_internal}


def block_of(kind: Any) -> type | None:
    """Return the settings class of a setting that is a block, or None for a plain value."""
    arms = typing.get_args(kind) if _is_union(kind) else (kind,)
    blocks = (arm for arm in map(_plain, arms) if isinstance(arm, type) and is_dataclass(arm))
    return next(blocks, None)


@overload
def settings(cls: type[Settings], /) -> type[Settings]: ...


@overload
def settings(*, block: str = "") -> Callable[[type[Settings]], type[Settings]]: ...


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(
    cls: type[Settings] | None = None, /, *, block: str = ""
) -> type[Settings] | Callable[[type[Settings]], type[Settings]]:
    """Create a settings class from annotations and defaults.

    Args:
        cls: the class, if the decorator is used without parentheses.
        block: name of the block in files, which prefixes the setting's name in messages.
    """
    return _made(cls, block) if cls is not None else lambda given: _made(given, block)


def _made(cls: type[Settings], block: str) -> type[Settings]:
    annotations = vars(cls).get("__annotations__", {})
    ranges = [(name, allowed) for name, kind in annotations.items() if (allowed := _range(kind))]
    limits = [(name, allowed.low, allowed.high, allowed) for name, allowed in ranges]
    choices = [(name, known) for name, kind in annotations.items() if (known := _choices(kind))]
    prefix = f"{block}." if block else ""
    own = vars(cls).get("__post_init__")
    inherited = next((base.__post_init__ for base in cls.__mro__[1:] if hasattr(base, "__post_init__")), None)

    def check(self: Settings) -> None:
        if inherited is not None:
            inherited(self)
        for name, low, high, allowed in limits:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise SettingsError(f"{prefix}{name} {allowed.violation(value)}")
        for name, known in choices:
            if getattr(self, name) not in known:
                found = getattr(self, name)
                raise SettingsError(f"{prefix}{name} must be one of {', '.join(known)}, got {found!r}")
        if own is not None:
            own(self)

    # Before the dataclass is created, because one with slots is a copy of this class.
    for name, value in (("__post_init__", check), ("__pydantic_config__", {"extra": "forbid"})):
        setattr(cls, name, value)
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


def _described(declared: "Field[Any]", kind: Any) -> Setting:
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    return Setting(
        name=declared.name.removesuffix("_"),
        kind=_plain(kind),
        default=default,
        allowed=_range(kind),
        is_advanced=ADVANCED in _marks(kind),
        is_internal=INTERNAL in _marks(kind),
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


def read(cls: type[Settings], value: object, *, as_file: bool) -> Settings:
    """Create settings from plain values, such as those of YAML, JSON and `user_config`.

    Args:
        as_file: advanced settings are under `advanced`, and internal ones are rejected. Otherwise all are
            side by side, as in Python.

    Raises:
        SettingsError: all unknown, misplaced, missing and out-of-range settings, one line each.
    """
    reader = _Reader(as_file=as_file)
    found = reader.block(value, cls, "")
    if reader.errors:
        raise SettingsError("\n".join(reader.errors))
    return cast("Settings", found)


def plain(value: object) -> Any:
    """Return settings as plain values, all side by side. `read` restores them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name.removesuffix("_"): plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.value if isinstance(value, enum.Enum) else value


def as_config(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as a file contains them: advanced ones under `advanced` in their block.

    Args:
        values: values by name; a nested block is a mapping.

    Raises:
        SettingsError: a setting does not exist.
    """
    usual: dict[str, Any] = {}
    advanced: dict[str, Any] = {}
    known = in_files(cls)
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{cls.__name__} has no setting {name} in files")
        block = block_of(known[name].kind)
        given = as_config(block, value) if block is not None and isinstance(value, Mapping) else value
        (advanced if known[name].is_advanced else usual)[name] = given
    return usual | ({ADVANCED.value: advanced} if advanced else {})


def hot_settings(settings: object, cold: Collection[str]) -> dict[str, Any]:
    """Return settings as plain values for `user_config`, except cold ones, which need a new process."""
    return {name: value for name, value in plain(settings).items() if name not in cold}


def with_hot_settings(settings: Settings, given: Mapping[str, Any], cold: Collection[str]) -> Settings:
    """Return the settings with given values replaced.

    Args:
        given: values by name. A block is replaced as a whole: omitted settings in it have their defaults.

    Raises:
        SettingsError: a name is unknown or cold, or a value is out of range.
    """
    known = {each.name for each in fields(settings)}  # type: ignore[arg-type]  # a settings class
    if wrong := sorted(name for name in given if name not in known or name in cold):
        raise SettingsError(
            f"user_config has {', '.join(map(repr, wrong))}, which cannot change in a running "
            "process: set it in the args of the application, which replaces the process; changeable: "
            f"{', '.join(sorted(known - set(cold)))}"
        )
    try:
        return read(type(settings), {**plain(settings), **given}, as_file=False)
    except SettingsError as exc:
        raise SettingsError(f"user_config: {'; '.join(str(exc).splitlines())}") from exc


def changed(settings: Settings, path: str, value: object) -> Settings:
    """Return a copy with another value under a dotted path, which must exist."""
    name, _, rest = path.partition(".")
    new = changed(getattr(settings, name), rest, value) if rest else value
    return replace(settings, **{name: new})  # type: ignore[type-var]


class _Invalid:
    """Placeholder for an invalid value; its reason is among the errors."""


_INVALID = _Invalid()
# Similarity of a misspelt key to the name that was meant, in whatever block that is.
_ALMOST = 0.9


class _Reader:
    """Creates settings from plain values, and collects all errors with the full paths of their keys."""

    def __init__(self, *, as_file: bool) -> None:
        self._as_file = as_file
        self.errors: list[str] = []

    def block(self, given: object, cls: type, path: str) -> Any:
        """Create an object of a settings class."""
        # A key without a value: all defaults.
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            return self._error(f"{path or 'args'} must be a mapping of settings, got {given!r}")
        known = self._known(cls)
        before = len(self.errors)
        found: dict[str, Any] = {}
        for key, value, here, is_advanced in self._entries(given, cls, path):
            setting = known.get(key)
            if setting is None:
                self._error(f"{here}{self._unknown(key, cls, is_advanced=is_advanced)}")
            elif self._as_file and setting.is_advanced is not is_advanced:
                self._error(_misplaced(here, path, key, is_advanced=is_advanced))
            else:
                found[key] = self._setting(value, setting, here)
        for name, setting in known.items():
            if setting.default is MISSING and name not in found:
                self._error(f"{_joined(path, name)} is missing")
        if len(self.errors) > before:
            return _INVALID
        try:
            return cls(**{f"{name}_" if iskeyword(name) else name: each for name, each in found.items()})
        except ValueError as exc:
            return self._error(f"{path}: {exc}" if path else str(exc))

    def _known(self, cls: type) -> dict[str, Setting]:
        return in_files(cls) if self._as_file else {each.name: each for each in describe(cls)}

    def _entries(
        self, given: Mapping[Any, Any], cls: type, path: str
    ) -> Iterator[tuple[Any, Any, str, bool]]:
        """Yield each key of a block with its value and full path, and whether it is under `advanced`."""
        has_advanced = self._as_file and any(each.is_advanced for each in self._known(cls).values())
        for key, value in given.items():
            here = _joined(path, key)
            if key != ADVANCED.value or not has_advanced:
                yield key, value, here, False
            elif isinstance(value, Mapping):
                yield from ((inner, each, _joined(here, inner), True) for inner, each in value.items())
            elif value is not None:
                self._error(f"{here} must be a mapping of settings, got {value!r}")

    def _unknown(self, key: object, cls: type[Any], *, is_advanced: bool) -> str:
        # A subclass adds what follows from other parts of a file.
        if any(key in self._known(complete) for complete in cls.__subclasses__()):
            return " cannot be set here: it is derived from models"
        own, inside = self._paths(cls, in_advanced=is_advanced), dict[str, str]()
        for name, setting in self._known(cls).items():
            if (block := block_of(setting.kind)) is not None:
                inside |= {inner: f"{own[name]}.{path}" for inner, path in self._paths(block).items()}
        near = partial(difflib.get_close_matches, str(key), n=1)
        found = near(own, cutoff=_ALMOST) or near(inside, cutoff=_ALMOST) or near(own)
        return f": unknown key; did you mean {(inside | own)[found[0]]}?" if found else ": unknown key"

    def _paths(self, cls: type, *, in_advanced: bool = False) -> dict[str, str]:
        """Return where each setting of a block is written, by its name."""
        return {
            name: f"{ADVANCED.value}.{name}"
            if self._as_file and setting.is_advanced and not in_advanced
            else name
            for name, setting in self._known(cls).items()
        }

    def _setting(self, value: object, setting: Setting, path: str) -> Any:
        found = self._value(value, setting.kind, path)
        allowed = setting.allowed
        if allowed is None or found is None or found is _INVALID or allowed.low <= found <= allowed.high:
            return found
        return self._error(f"{path} {allowed.violation(found)}")

    def _value(self, value: Any, kind: Any, path: str) -> Any:
        """Create a value of a type."""
        kind = _plain(kind)
        if _is_union(kind):
            return self._one_of(value, typing.get_args(kind), path)
        if isinstance(kind, type) and is_dataclass(kind):
            return self.block(value, kind, path)
        origin = typing.get_origin(kind)
        if (origin is tuple and isinstance(value, list | tuple)) or (
            origin is Mapping and isinstance(value, Mapping)
        ):
            return self._collection(value, typing.get_args(kind), path)
        found = _scalar(value, kind)
        if found is None and kind is not Any:
            return self._error(f"{path} must be {_name(kind)}, got {value!r}")
        return found

    def _collection(self, value: Any, kinds: tuple[Any, ...], path: str) -> Any:
        """Create a tuple or a mapping."""
        if not isinstance(value, Mapping):
            found = [self._value(each, kinds[0], f"{path}[{place}]") for place, each in enumerate(value)]
            return _INVALID if _INVALID in found else tuple(found)
        pairs = {
            self._value(key, kinds[0], path): self._value(each, kinds[1], _joined(path, key))
            for key, each in value.items()
        }
        return _INVALID if _INVALID in (*pairs, *pairs.values()) else pairs

    def _one_of(self, value: object, arms: tuple[Any, ...], path: str) -> Any:
        """Create a value of the first type that accepts it."""
        if value is None and types.NoneType in arms:
            return None
        arms = tuple(arm for arm in arms if arm is not types.NoneType)
        if len(arms) == 1:
            return self._value(value, arms[0], path)
        for arm in arms:
            trial = _Reader(as_file=self._as_file)
            found = trial._value(value, arm, path)
            if not trial.errors:
                return found
        return self._error(f"{path} must be {' or '.join(map(_name, arms))}, got {value!r}")

    def _error(self, sentence: str) -> _Invalid:
        self.errors.append(sentence)
        return _INVALID


def _known_values(kind: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal` or an enumeration, none for other types."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(each.value for each in kind)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _scalar(value: object, kind: Any) -> Any:
    """Return the value as a string, a number, a boolean or one of known values, else None.

    Numbers may be quoted: YAML reads `1e-4` as a string.
    """
    if known := _known_values(kind):
        made = kind(value) if isinstance(kind, type) and value in known else value
        return made if value in known else None
    if kind in (str, bool):
        return value if isinstance(value, kind) else None
    if kind is Any or (kind is int and isinstance(value, int) and not isinstance(value, bool)):
        return value
    return _number(value, kind)


def _number(value: object, kind: Any) -> float | None:
    if kind not in (int, float) or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if kind is float:
        return number
    return int(number) if number.is_integer() else None


def _name(kind: Any) -> str:
    if known := _known_values(kind):
        return f"one of {', '.join(map(str, known))}"
    names: dict[Any, str] = {
        str: "a string",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        tuple: "a list",
        Mapping: "a mapping",
    }
    return names.get(typing.get_origin(_plain(kind)) or _plain(kind), "settings")


def _misplaced(here: str, path: str, key: str, *, is_advanced: bool) -> str:
    if is_advanced:
        return f"{here} is not an advanced setting: write it as {_joined(path, key)}"
    return f"{here} is an advanced setting: write it as {_joined(_joined(path, ADVANCED.value), key)}"


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
