"""What admins have chosen of a pool's endpoints, kept over restarts."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from serve_app.serving.state.store import StateError, StateStore

logger = logging.getLogger("ray.serve")


class KeptChoices:
    """Endpoints that were added and taken away by hand.

    Args:
        store: None keeps nothing after the end of this process.

    Attributes:
        added: URLs besides those that are found.
        removed: URLs that get no requests though they are found.
    """

    def __init__(self, store: StateStore | None) -> None:
        self._store = store
        self.added: set[str] = set()
        self.removed: set[str] = set()

    def __repr__(self) -> str:
        return f"<KeptChoices added={len(self.added)} removed={len(self.removed)} {self._store}>"

    async def load(self) -> None:
        """Read what was kept; a store that cannot be read is logged, and the watcher begins without it."""
        if self._store is None:
            return
        try:
            document = await asyncio.to_thread(self._store.load)
        except StateError as exc:
            logger.warning("event=endpoints_not_restored reason=%r", str(exc))
            return
        if document is not None:
            self.added, self.removed = _read(document)

    def add(self, url: str, *, found: bool) -> None:
        """An endpoint is wanted; `found` says that it need not be added for that."""
        self.removed.discard(url)
        if not found:
            self.added.add(url)

    def remove(self, url: str, *, found: bool) -> None:
        """An endpoint is not wanted; `found` says that it would come back by itself."""
        self.added.discard(url)
        if found:
            self.removed.add(url)

    async def save(self) -> bool:
        """Keep it; return whether it is kept."""
        if self._store is None:
            return False
        document = {"added": sorted(self.added), "removed": sorted(self.removed)}
        try:
            await asyncio.to_thread(self._store.save, document)
        except StateError as exc:
            logger.warning("event=endpoints_not_kept reason=%r", str(exc))
            return False
        return True


def _read(document: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    return {str(url) for url in document["added"]}, {str(url) for url in document["removed"]}
