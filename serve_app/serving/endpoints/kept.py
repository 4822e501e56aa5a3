"""What admins have chosen of a pool's endpoints, kept over restarts."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Mapping
from typing import Any

from serve_app.serving.state.calls import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, StoreCalls
from serve_app.serving.state.store import StateError, StateStore

logger = logging.getLogger("ray.serve")


# Between two attempts to read what is kept, while the store does not answer.
_RETRY_S = 10.0


class KeptChoices:
    """Endpoints that were added and taken away by hand.

    While the store cannot be read, nothing is written over what it holds. Choices of that time are added to
    those that are read in the end, and count more.

    Args:
        store: None keeps nothing after the end of this process.

    Attributes:
        added: URLs besides those that are found.
        removed: URLs that get no requests though they are found.
    """

    def __init__(self, store: StateStore | None) -> None:
        self._store = store
        self._calls = None if store is None else StoreCalls(store)
        self._restored = store is None
        # What was chosen before that.
        self._chosen: set[str] = set()
        self._retry: asyncio.Task[None] | None = None
        self.added: set[str] = set()
        self.removed: set[str] = set()

    def __repr__(self) -> str:
        return f"<KeptChoices added={len(self.added)} removed={len(self.removed)} {self._store}>"

    async def load(self) -> None:
        """Read what was kept; while the store does not answer, the watcher goes on without it."""
        if self._store is None or self._restored or self._retry is not None:
            return
        try:
            await self._restore()
        except StateError as exc:
            logger.warning("event=endpoints_not_restored reason=%r", str(exc))
            loop = asyncio.get_running_loop()
            self._retry = loop.create_task(self._try_again(), context=contextvars.Context())

    def close(self) -> None:
        """Try no more to read."""
        if self._retry is not None:
            self._retry.cancel()

    def add(self, url: str, *, found: bool) -> None:
        """An endpoint is wanted; `found` says that it need not be added for that."""
        self._note(url)
        self.removed.discard(url)
        if not found:
            self.added.add(url)

    def remove(self, url: str, *, found: bool) -> None:
        """An endpoint is not wanted; `found` says that it would come back by itself."""
        self._note(url)
        self.added.discard(url)
        if found:
            self.removed.add(url)

    async def save(self) -> bool:
        """Keep it; return whether it is kept."""
        if self._store is None or self._calls is None:
            return False
        store, document = self._store, {"added": sorted(self.added), "removed": sorted(self.removed)}
        if not self._restored:
            logger.warning("event=endpoints_not_kept reason=%r", f"{store.path} has not been read yet")
            return False
        try:
            await self._calls.answer(lambda: store.save(document), SAVE_TIMEOUT_S)
        except StateError as exc:
            logger.warning("event=endpoints_not_kept reason=%r", str(exc))
            return False
        return True

    def _note(self, url: str) -> None:
        if not self._restored:
            self._chosen.add(url)

    async def _restore(self) -> None:
        assert self._store is not None, "asked for with a store only"
        assert self._calls is not None, "as above"
        document = await self._calls.answer(self._store.load, LOAD_TIMEOUT_S)
        self._restored = True
        if document is None:
            return
        added, removed = _read(document)
        self.added |= added - self._chosen
        self.removed |= removed - self._chosen

    async def _try_again(self) -> None:
        while not self._restored:
            await asyncio.sleep(_RETRY_S)
            with contextlib.suppress(StateError):
                await self._restore()
        logger.info("event=endpoints_restored added=%d removed=%d", len(self.added), len(self.removed))
        await self.save()


def _read(document: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    return {str(url) for url in document["added"]}, {str(url) for url in document["removed"]}
