"""Endpoints in a file: one URL on each line; `#` begins a comment."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from serve_app.serving.endpoints.sources.polling import poll
from serve_app.serving.endpoints.url import EndpointUrl

Tell = Callable[[frozenset[EndpointUrl]], None]

# Cheaper than a name to resolve, and somebody who edits a file waits for it.
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class FileSource:
    """The URLs in a file. One with a line that is no URL is not taken, and what it said before remains."""

    path: Path
    is_fixed: bool = False

    @classmethod
    def parse(cls, text: str) -> "FileSource":
        """Read `file:///path`.

        Raises:
            ValueError: the path is not absolute.
        """
        parts = urlsplit(text)
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"a file of endpoints looks like file:///path, got {text!r}")
        return cls(Path(unquote(parts.path)))

    async def follow(self, tell: Tell, refresh_s: float) -> None:
        """Read the file again and again; it is small."""
        await poll(f"file://{self.path}", self._find, tell, min(refresh_s, _REFRESH_S))

    async def _find(self) -> frozenset[EndpointUrl]:
        text = await asyncio.to_thread(self.path.read_text, encoding="utf-8")
        lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
        return frozenset(EndpointUrl.parse(line) for line in lines if line)
