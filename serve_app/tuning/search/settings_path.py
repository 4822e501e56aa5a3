"""Access to one value in nested frozen settings by its dotted path, such as `isolation.max_long_prefills`.

A change makes new settings and runs the checks of every class on the path, so an impossible value is refused
with the settings' own message.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from serve_app.errors import SettingsError

Settings = TypeVar("Settings")


def value_at(settings: object, path: str) -> Any:
    """The value under a path.

    Raises:
        SettingsError: there is none.
    """
    value = settings
    for name in path.split("."):
        if not is_dataclass(value) or name not in {field.name for field in fields(value)}:
            raise SettingsError(f"there is no setting {path}: {type(value).__name__} has no {name!r}")
        value = getattr(value, name)
    return value


def with_value(settings: Settings, path: str, value: object) -> Settings:
    """The same settings with another value under a path.

    Raises:
        SettingsError: there is no such setting, or it cannot have this value.
    """
    # Names the path when there is no such setting.
    value_at(settings, path)
    try:
        return _changed(settings, path, value)
    except ValueError as error:
        raise SettingsError(f"{path} cannot be {value}: {error}") from error


def with_values(settings: Settings, values: Mapping[str, object]) -> Settings:
    """The same settings with other values, by path."""
    for path, value in values.items():
        settings = with_value(settings, path, value)
    return settings


def _changed(settings: Settings, path: str, value: object) -> Settings:
    name, _, rest = path.partition(".")
    new = _changed(getattr(settings, name), rest, value) if rest else value
    return replace(settings, **{name: new})  # type: ignore[type-var]
