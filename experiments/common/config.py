"""Settings of an experiment: `config.yaml` with the changes of `--quick` and `--set`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import set_path

S = TypeVar("S")

QUICK = "quick"
"""Key of `config.yaml` with the changes of `--quick`."""


def read_settings(path: Path, settings: type[S], *, quick: bool = False, changes: Sequence[str] = ()) -> S:
    """Read a configuration.

    Args:
        settings: the dataclass in the file.
        quick: apply the changes under `quick`.
        changes: single settings, as `path.to.key=VALUE` with the value in YAML.

    Raises:
        SettingsError: the file is invalid; the message names the mistake.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise SettingsError(f"{path} is no configuration of an experiment: it holds no mapping")
        small = document.pop(QUICK, {})
        if quick:
            document = merged(document, small)
        for change in changes:
            document = merged(document, _nested(change))
        return TypeAdapter(settings).validate_python(document)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{path} is no configuration of this experiment: {error}") from error


def as_json(settings: object) -> dict[str, Any]:
    """Return all settings, resolved, as a row records them."""
    document: dict[str, Any] = TypeAdapter(type(settings)).dump_python(settings, mode="json")
    return document


def merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with changes; mappings are merged, other values replaced."""
    result = dict(document)
    for name, value in changes.items():
        there = result.get(name)
        if isinstance(there, dict) and isinstance(value, dict):
            value = merged(there, value)  # noqa: PLW2901 - the value in its merged form
        result[name] = value
    return result


def _nested(change: str) -> dict[str, Any]:
    path, equals, text = change.partition("=")
    if not (path and equals):
        raise SettingsError(f"a change must read path.to.key=VALUE, got {change!r}")
    nested: dict[str, Any] = {}
    set_path(nested, path, yaml.safe_load(text))
    return nested
