"""The tree of settings, from the arguments of the application down: blocks, and the settings in each."""

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Any

from docs_reference.source_text import attribute_texts, field_comments, summary
from serve_app.core.settings_base import Setting, in_files
from serve_app.settings.application import ApplicationConfig

_NAMES_OF_THE_MODEL = "the name and aliases of the model"
DEFAULTS_IN_FILES = {
    f"models[].pools[].engine.{kind}.advanced.served_model_names": _NAMES_OF_THE_MODEL
    for kind in ("vllm", "remote")
}
"""What holds where a file is silent, in words, where that is not the default of the class itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEntry:
    """One setting, as the reference lists it.

    Attributes:
        path: from the application's arguments down, as in a file, such as `models[].pools[].replicas`.
        kind: its type, without annotations.
        default: as the class has it, or as the block that holds it has it; `dataclasses.MISSING` when there
            is none.
        default_in_files: what holds instead of it where a file is silent; None when it is `default`.
        limits: which values are allowed, in words; empty when the type allows all.
        texts: what the docstring and the comment say.
        blocks: paths of the blocks that it holds.
        is_advanced: few users need it, so it is listed after the others.
    """

    path: str
    kind: Any
    default: object
    default_in_files: str | None
    limits: str
    texts: tuple[str, ...]
    blocks: tuple[str, ...]
    is_advanced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A settings class at one place in the tree; `path` is empty for the application's arguments."""

    path: str
    cls: type
    text: str
    settings: tuple[SettingEntry, ...]


def blocks() -> Iterator[Block]:
    """Every block of the application's settings, parents before what they hold."""
    yield from _walk(ApplicationConfig, "", None)


def _walk(cls: type, path: str, instance: object) -> Iterator[Block]:
    attributes, comments = attribute_texts(cls), field_comments(cls)
    inner: dict[str, tuple[type, object]] = {}
    entries = []
    for setting in in_files(cls).values():
        here = ".".join(filter(None, (path, "advanced" * setting.is_advanced, setting.name)))
        default = setting.default
        if default is not MISSING and instance is not None:
            default = getattr(instance, setting.name)
        nested = {f"{here}{suffix}": kind for kind, suffix in _nested(setting.kind)}
        for place, kind in nested.items():
            inner[place] = (kind, default if isinstance(default, kind) else None)
        texts = (attributes.get(setting.name), comments.get(setting.name))
        entries.append(
            SettingEntry(
                path=here,
                kind=setting.kind,
                default=default,
                default_in_files=DEFAULTS_IN_FILES.get(here),
                limits=_limits(setting),
                texts=tuple(text for text in texts if text),
                blocks=tuple(nested),
                is_advanced=setting.is_advanced,
            )
        )
    yield Block(path=path, cls=cls, text=summary(cls), settings=tuple(entries))
    for place, (kind, given) in inner.items():
        yield from _walk(kind, place, given)


def _limits(setting: Setting) -> str:
    """The range in the words of its message, without its verb and without the type."""
    words = setting.allowed.words if setting.allowed else ""
    return re.sub(r"^must (not )?be (?:a (positive )?number(?:, )?)?", r"\1\2", words).strip()


def _nested(kind: Any) -> Iterator[tuple[type, str]]:
    """Settings classes inside a type, with what the path gets for a list or a mapping around them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind, ""
    elif origin is typing.Annotated:
        yield from _nested(arguments[0])
    elif origin in {typing.Union, types.UnionType}:
        for arm in arguments:
            yield from _nested(arm)
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        yield from ((inner, f".NAME{suffix}") for inner, suffix in _nested(arguments[1]))
    elif origin in {tuple, list}:
        yield from ((inner, f"[]{suffix}") for inner, suffix in _nested(arguments[0]))
