"""Settings that change while a process runs: what Ray Serve hands it as `user_config`.

`hot_settings` turns settings into plain values and leaves out the cold ones; `with_hot_settings` makes of
such values, or of some of them, settings again. Cold and unknown names are refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from serve_app.errors import SettingsError

Settings = TypeVar("Settings")


def hot_settings(settings: object, cold: Collection[str]) -> dict[str, Any]:
    """All settings but the cold ones, as JSON has them."""
    plain: dict[str, Any] = TypeAdapter(type(settings)).dump_python(settings, mode="json")
    return {name: value for name, value in plain.items() if name not in cold}


def with_hot_settings(settings: Settings, given: Mapping[str, Any], cold: Collection[str]) -> Settings:
    """The settings with what is given in place of what they had.

    Args:
        given: by name. A block counts as a whole: what is left out in it has its default.

    Raises:
        SettingsError: a name is unknown or cold, or a value is out of range.
    """
    known = {each.name for each in fields(settings)}  # type: ignore[arg-type]  # a settings class
    if wrong := sorted(name for name in given if name not in known or name in cold):
        raise SettingsError(
            f"user_config has {', '.join(map(repr, wrong))}, which cannot change in a running "
            "process: set it in the args of the application, which replaces the process; what may change: "
            f"{', '.join(sorted(known - set(cold)))}"
        )
    plain = TypeAdapter(type(settings)).dump_python(settings, mode="json")
    try:
        changed: Settings = TypeAdapter(type(settings)).validate_python({**plain, **given})
    except ValidationError as exc:
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in exc.errors())
        raise SettingsError(f"user_config: {'; '.join(faults)}") from exc
    return changed
