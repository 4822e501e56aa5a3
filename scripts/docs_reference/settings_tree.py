"""Tree of settings, from the arguments of the application down: blocks and their settings."""

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Any

from docs_reference.source_text import attribute_texts, field_comments, summary
from serve_app.core.settings_base import Setting, in_files
from serve_app.settings.application import ApplicationConfig

# Default in files of the names that an engine serves, which differs from that of its class.
_NAMES_OF_THE_MODEL = "the name and aliases of the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEntry:
    """One setting in the reference.

    Attributes:
        path: from the application's arguments down, as in a file, such as `models[].pools[].replicas`.
        kind: its type, without annotations.
        default: of the class, or of the enclosing block; `dataclasses.MISSING` without a default.
        default_in_files: the default in files, in words; None if it is `default`.
        limits: allowed values, in words; empty if the type allows all.
        texts: from the docstring and the comment.
        blocks: paths of the blocks that it contains.
        is_advanced: rarely needed, and so listed after the others.
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
    """Yield every block of the application's settings, parents first."""
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
                default_in_files=_NAMES_OF_THE_MODEL if here.endswith(".served_model_names") else None,
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
    """Return the range as its error message states it, without the verb and the type."""
    words = setting.allowed.words if setting.allowed else ""
    return re.sub(r"^must (not )?be (?:a (positive )?number(?:, )?)?", r"\1\2", words).strip()


def _nested(kind: Any) -> Iterator[tuple[type, str]]:
    """Yield the settings classes inside a type, with the path suffix of an enclosing list or mapping."""
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
