"""The tree of settings, from the arguments of the application down: blocks, and the settings in each."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from docs_reference.source_text import attribute_texts, field_comments, summary
from serve_app.settings.application import AppSettings

NOT_IN_FILES = frozenset(
    {
        "gateway.models",
        "models[].scheduler.model",
        "models[].scheduler.aliases",
        "models[].scheduler.routing.pools",
    }
)
"""Settings that follow from others and are refused in a file."""


class Required:
    """Stands for the default of a setting that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting.

    Attributes:
        path: from the application's arguments down, such as `models[].pools[].replicas`.
        kind: its type, without annotations.
        default: as the class has it, or as the block that holds it has it; `Required` when there is none.
        texts: what the docstring and the comment say.
        blocks: paths of the blocks that it holds.
        is_advanced: few users need it, so it is listed after the others.
    """

    path: str
    kind: Any
    default: object
    texts: tuple[str, ...]
    blocks: tuple[str, ...]
    is_advanced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A settings class at one place in the tree; `path` is empty for the application's arguments."""

    path: str
    text: str
    settings: tuple[Setting, ...]


def blocks() -> Iterator[Block]:
    """Every block of the application's settings, parents before what they hold."""
    yield from _walk(AppSettings, "", None)


def _walk(cls: type, path: str, instance: object) -> Iterator[Block]:
    inner = {}
    settings = []
    for declared in _declared(cls, instance):
        here = f"{path}.{declared.name}" if path else declared.name
        if here in NOT_IN_FILES:
            continue
        nested = {f"{here}{suffix}": kind for kind, suffix in _nested(declared.kind)}
        for place, kind in nested.items():
            inner[place] = (kind, declared.default if isinstance(declared.default, kind) else None)
        settings.append(
            Setting(
                path=here,
                kind=declared.kind,
                default=declared.default,
                texts=declared.texts,
                blocks=tuple(nested),
                is_advanced=declared.is_advanced,
            )
        )
    yield Block(path=path, text=summary(cls), settings=tuple(settings))
    for place, (kind, given) in inner.items():
        yield from _walk(kind, place, given)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    name: str
    kind: Any
    default: object
    texts: tuple[str, ...]
    is_advanced: bool


def _declared(cls: type, instance: object) -> Iterator[_Declared]:
    """The fields of a settings class; their defaults are those of the instance, where a block gives one."""
    hints = typing.get_type_hints(cls)
    attributes, comments = attribute_texts(cls), field_comments(cls)
    for name, (default, metadata) in _fields(cls).items():
        if default is not Required and instance is not None:
            default = getattr(instance, name)  # noqa: PLW2901 - the same default, as this place has it
        texts = (attributes.get(name), comments.get(name))
        yield _Declared(
            name=name,
            kind=hints[name],
            default=default,
            texts=tuple(text for text in texts if text),
            is_advanced=bool(metadata.get("advanced")),
        )


def _fields(cls: Any) -> dict[str, tuple[object, Mapping[str, Any]]]:
    """Default and metadata of each field, of a dataclass or of the pydantic model at the top."""
    if dataclasses.is_dataclass(cls):
        return {each.name: (_default(each), each.metadata) for each in dataclasses.fields(cls) if each.init}
    return {
        name: (Required if info.is_required() else info.get_default(call_default_factory=True), {})
        for name, info in cls.model_fields.items()
    }


def _default(field: "dataclasses.Field[Any]") -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return Required


def _nested(kind: Any) -> Iterator[tuple[type, str]]:
    """Settings classes inside a type, with what the path gets for a list or a mapping around them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind, ""
    elif origin in {typing.Union, types.UnionType}:
        for arm in arguments:
            yield from _nested(arm)
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        yield from ((inner, f".NAME{suffix}") for inner, suffix in _nested(arguments[1]))
    elif origin in {tuple, list}:
        yield from ((inner, f"[]{suffix}") for inner, suffix in _nested(arguments[0]))
