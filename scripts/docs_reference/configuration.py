"""Configuration reference: every setting with its full path, type, default and reason."""

import enum
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from typing import Any

from docs_reference.markdown import anchor, code, document, item, sentence, table
from docs_reference.settings_tree import Block, SettingEntry, blocks

_INTRODUCTION = """
# Configuration reference

A configuration is a file for Ray Serve. The settings are under `args` of the application whose `import_path`
is `serve_app.app:build_app`. A small example is `configs/local.yaml`.

- A path such as `models[].pools[].replicas` names a setting: `[]` stands for each entry of a list, `.NAME`
  for any key of a mapping.
- Parentheses show the type, the allowed values, and the default. `required` settings have no default.
- Advanced settings are in a block `advanced` inside their block. Only files have this block: `--set`, the
  tuner and logs name a setting without it.
- None is `null` in YAML.
- Names end with their unit: `_s` is seconds, `_ms` milliseconds, `_tokens` tokens, `_bytes` bytes, `_ratio` a
  share between 0 and 1.
- Unknown keys and values out of range are rejected when the file is read. The message has the full path and,
  for unknown keys, the nearest known one.
"""

_ADVANCED = "Most installations never change these settings: the defaults fit, or the tuner sets them."

_WORDS: Mapping[object, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "any value",
}


_FIRST = "configuration.md"
# Pages by the beginning of their blocks' paths, and their headings; the first match counts.
_PAGES: Mapping[str, tuple[str, str]] = {
    "models[].scheduler": ("configuration-scheduler.md", "# Configuration: scheduler"),
    "models[].tuner": ("configuration-tuner.md", "# Configuration: tuner"),
    "models[]": ("configuration-models.md", "# Configuration: models, pools and engines"),
}
CONFIGURATION_PAGES = (_FIRST, *(name for name, _ in _PAGES.values()))


def configuration_page(name: str = _FIRST) -> str:
    """Return one of `CONFIGURATION_PAGES`; the first one has the introduction and lists the blocks of all."""
    found = list(blocks())
    sections = [_section(block) for block in found if _page_of(block.path) == name]
    if name == _FIRST:
        return document(_INTRODUCTION, "## All blocks", _overview(found), *sections)
    heading = next(heading for page, heading in _PAGES.values() if page == name)
    about = f"A part of the [configuration reference]({_FIRST}), which explains the notation."
    return document(heading, about, *sections)


def _page_of(path: str) -> str:
    return next((name for start, (name, _) in _PAGES.items() if path.startswith(start)), _FIRST)


def _link(path: str, page: str) -> str:
    """Return a link from a page to a block."""
    target = _page_of(path)
    return f"[{code(path or 'args')}]({'' if target == page else target}{anchor(path or 'args')})"


def _overview(found: list[Block]) -> str:
    rows = (
        (
            _link(block.path, _FIRST),
            sentence(_first_sentence(block.text)),
            *map(str, _counts([block])),
        )
        for block in found
    )
    usual, advanced = _counts(found)
    total = f"{usual} settings and {advanced} advanced settings in total."
    return total + "\n\n" + table(("Block", "Purpose", "Settings", "Advanced"), rows)


def _counts(found: list[Block]) -> tuple[int, int]:
    """Return the numbers of usual and of advanced settings in these blocks."""
    marks = [
        ".advanced." in f".{setting.path}"
        for block in found
        for setting in block.settings
        if not setting.blocks
    ]
    return marks.count(False), marks.count(True)


def _section(block: Block) -> str:
    place = f"Defined by {code(block.cls.__name__)} in {code(_file(block.cls))}."
    parts = [f"## {code(_title(block))}", "\n\n".join(map(sentence, block.text.split("\n\n"))), place]
    page = _page_of(block.path)
    usual = [_entry(setting, page) for setting in block.settings if not setting.is_advanced]
    advanced = [_entry(setting, page) for setting in block.settings if setting.is_advanced]
    parts.append("\n".join(usual))
    if advanced:
        parts += [f"### Advanced: {code(_title(block))}", _ADVANCED, "\n".join(advanced)]
    return "\n\n".join(part for part in parts if part)


def _file(cls: type) -> str:
    return f"{cls.__module__.replace('.', '/')}.py"


def _title(block: Block) -> str:
    return block.path or "args"


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n", maxsplit=1)[0].split()).split(". ")[0]


def _entry(setting: SettingEntry, page: str) -> str:
    body = " ".join(map(sentence, setting.texts))
    if setting.blocks:
        links = ", ".join(_link(path, page) for path in setting.blocks)
        body = f"{body} See {links}.".strip()
    facts = [_type(setting.kind), setting.limits, _default(setting)]
    return item(f"**{code(setting.path)}** ({', '.join(filter(None, facts))})", body)


def _default(setting: SettingEntry) -> str:
    if setting.default_in_files is not None:
        return f"default: {setting.default_in_files}"
    if setting.default is MISSING:
        return "required"
    return "" if is_dataclass(setting.default) else f"default {code(_value(setting.default))}"


def _type(kind: Any) -> str:
    """Describe a type in words."""
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case None:
            return _plain_type(kind)
        case typing.Annotated:
            return _type(arguments[0])
        case typing.Literal:
            return _one_of(arguments)
        case typing.Union | types.UnionType:
            return " or ".join(_type(arm) for arm in arguments)
        case origin if issubclass(origin, Mapping):
            return f"mapping, each value {_type(arguments[1])}"
        case _:
            return f"list, each {_type(arguments[0])}"


def _plain_type(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    if is_dataclass(kind):
        return "block"
    if issubclass(kind, enum.Enum):
        return _one_of(member.value for member in kind)
    raise TypeError(f"no words for the type {kind}: add them to docs_reference.configuration")


def _one_of(values: Any) -> str:
    shown = [code(_value(value)) for value in values]
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


def _value(value: object) -> str:
    """Format a value as in YAML."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(_pairs(value))}}}"
    return json.dumps(value)


def _pairs(value: Mapping[Any, object]) -> Iterator[str]:
    return (f"{_value(key)}: {_value(entry)}" for key, entry in value.items())
