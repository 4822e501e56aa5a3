"""Reads the settings of an application; the only place where YAML becomes typed settings.

A key that nobody knows is refused by its full name, with the nearest known one as advice.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.errors import SettingsError
from serve_app.routing.pools import RoutingSettings, WrittenRouting
from serve_app.scheduling.settings import SchedulerSettings, WrittenScheduler
from serve_app.serving.gateway.settings import GatewaySettings, WrittenGateway
from serve_app.settings.application import AppSettings, WrittenApplication
from serve_app.settings.errors import explained
from serve_app.settings.resolve import resolve
from serve_app.settings.tree import TreeReader

IMPORT_PATH = "serve_app.app:build_app"

_EXTENDED: Mapping[type, type] = {
    WrittenGateway: GatewaySettings,
    WrittenScheduler: SchedulerSettings,
    WrittenRouting: RoutingSettings,
}


def load_settings(path: Path) -> AppSettings:
    """The settings of the one application in a Ray Serve configuration file.

    Raises:
        SettingsError: the file is no such configuration, or something in it is unknown or out of range.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise SettingsError(f"cannot read {path}: {exc}") from exc
    applications = content.get("applications", []) if isinstance(content, Mapping) else []
    ours = [entry for entry in applications if entry.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        raise SettingsError(f"{path} must hold one application of {IMPORT_PATH}, got {len(ours)}")
    return settings_of(ours[0].get("args", {}))


def settings_of(args: object) -> AppSettings:
    """The complete settings of an application's arguments, as a file gives them.

    Raises:
        SettingsError: something in them is unknown, misplaced, out of range, or does not go together.
    """
    return resolve(written(args))


def written(args: object) -> WrittenApplication:
    """The same as it stands in the file.

    Raises:
        SettingsError: all that is unknown, misplaced or out of range, one line each.
    """
    reader = TreeReader(_EXTENDED)
    tree = reader.laid_out(args, WrittenApplication)
    try:
        found = _adapter().validate_python(tree)
    except ValidationError as exc:
        raise SettingsError("\n".join([*reader.faults, *explained(exc, WrittenApplication)])) from exc
    if reader.faults:
        raise SettingsError("\n".join(reader.faults))
    return found


@cache
def _adapter() -> TypeAdapter[WrittenApplication]:
    return TypeAdapter(WrittenApplication)
