"""Values of the Helm chart: their schema, including the application's settings, and their reference."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs_reference.markdown import code, document, sentence, table
from docs_reference.settings_tree import Block, blocks

CHART = Path(__file__).resolve().parents[2] / "configs" / "helm"
SCHEMA = CHART / "values.schema.json"

_INTRODUCTION = """
# Chart reference

Values of the Helm chart in `configs/helm`. [Kubernetes](../kubernetes.md) describes the installation.

- `[]` stands for each entry of a list. A given list replaces the whole default list.
- Helm rejects unknown keys and values of another type before it creates anything.
- `application` has the settings of the [configuration reference](configuration.md), as under `args` of a
  configuration file.
"""

Schema = dict[str, Any]


def values_schema() -> str:
    """Return the schema of the chart's file, with the application's settings updated from the code."""
    schema: Schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    properties = schema["properties"]
    about = properties["application"]["description"]
    properties["application"] = {"description": about, **application_schema(blocks())}
    return json.dumps(schema, indent=2) + "\n"


def application_schema(found: Iterator[Block]) -> Schema:
    """Return the schema of an application's arguments: names and structure.

    Values are not looked at: that is the work of `check`, which explains what is wrong with one.
    """
    root = _block()
    for block in found:
        inside = _place(root, block.path)
        inside.setdefault("properties", {})
        if not any(key in inside for key in ("additionalProperties", "items")):
            inside["additionalProperties"] = False
        for setting in block.settings:
            _place(root, setting.path)
    return root


def _block() -> Schema:
    return {"additionalProperties": False, "properties": {}}


def _place(root: Schema, path: str) -> Schema:
    """Return the schema at a path, creating its parents."""
    here = root
    for step in filter(None, path.split(".")):
        name, brackets = re.fullmatch(r"(\w+)((?:\[\])*)", step).groups()  # type: ignore[union-attr]
        if name == "NAME":
            inner = here.get("additionalProperties")
            here["additionalProperties"] = here = inner if isinstance(inner, dict) else {}
        else:
            if name == "advanced":
                here.setdefault("properties", {}).setdefault("advanced", _block())
            here = here.setdefault("properties", {}).setdefault(name, {})
        for _ in range(len(brackets) // 2):
            here = here.setdefault("items", {})
    return here


def chart_page() -> str:
    """Return the reference of the chart's values."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = (
        (code(path), _default(found), sentence(text)) for path, text, found in _values(schema, defaults, "")
    )
    return document(_INTRODUCTION, table(("Value", "Default", "Meaning"), rows))


def _values(schema: Schema, default: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        found = default.get(name) if isinstance(default, Mapping) else None
        if here != "application" and (inner.get("properties") or inner.get("items", {}).get("properties")):
            if "description" in inner:
                yield here, inner["description"], None
            listed = "[]" if "items" in inner else ""
            yield from _values(inner.get("items", inner), None if listed else found, f"{here}{listed}")
        elif "description" in inner:
            yield here, inner["description"], None if here == "application" else found


def _default(value: Any) -> str:
    return "" if value is None or value in ("", [], {}) else code(json.dumps(value))
