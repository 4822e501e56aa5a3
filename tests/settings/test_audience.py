"""Advanced settings: under `advanced` once, and with a default."""

import typing
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from serve_app.core.settings_base import Setting, block_of, in_files
from serve_app.settings.application import ApplicationConfig


def leaves(
    cls: type, path: str = "args", *, is_advanced: bool = False
) -> Iterator[tuple[str, Setting, bool]]:
    """Yield every setting with a value, its path, and whether it or an enclosing block is advanced."""
    for setting in in_files(cls).values():
        here, apart = f"{path}.{setting.name}", is_advanced or setting.is_advanced
        assert not (is_advanced and setting.is_advanced), f"{here} is marked inside an advanced block"
        block = inner_block(setting.kind)
        if block is None:
            yield here, setting, apart
        else:
            yield from leaves(block, here, is_advanced=apart)


def inner_block(kind: Any) -> type | None:
    """Return the block class of a setting that is a block or a list of blocks."""
    arguments = typing.get_args(kind)
    return block_of(arguments[0]) if typing.get_origin(kind) is tuple else block_of(kind)


def test_an_advanced_setting_has_a_default() -> None:
    without = [
        path
        for path, setting, is_advanced in leaves(ApplicationConfig)
        if is_advanced and setting.default is MISSING
    ]
    assert without == []
