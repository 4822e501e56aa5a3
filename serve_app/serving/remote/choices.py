"""Persistent choices of admins about a pool's endpoints."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Mapping
from typing import Any

from serve_app.serving.state.calls import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, StoreCalls
from serve_app.serving.state.store import StateError, StateStore

logger = logging.getLogger("ray.serve")

# Interval of attempts to read the stored choices while the store does not answer.
_RETRY_S = 10.0


class EndpointChoices:
    """Endpoints that were added or removed by admins.

    While the store cannot be read, nothing is overwritten. Choices made in that time are merged with the
    stored ones later, and take precedence.

    Args:
        store: None disables persistence.

    Attributes:
        added: URLs in addition to the discovered ones.
        removed: discovered URLs that receive no requests.
    """

    def __init__(self, store: StateStore | None) -> None:
        self._store = store
        self._calls = None if store is None else StoreCalls(store)
        self._restored = store is None
        # URLs that were changed before the stored choices were read.
        self._chosen: set[str] = set()
        self._retry: asyncio.Task[None] | None = None
        self.added: set[str] = set()
        self.removed: set[str] = set()

    def __repr__(self) -> str:
        return f"<EndpointChoices added={len(self.added)} removed={len(self.removed)} {self._store}>"

    async def load(self) -> None:
        """Read the stored choices; while the store does not answer, the watcher works without them."""
        if self._store is None or self._restored or self._retry is not None:
            return
        try:
            await self._restore()
        except StateError as exc:
            logger.warning("event=endpoints_not_restored reason=%r", str(exc))
            loop = asyncio.get_running_loop()
            self._retry = loop.create_task(self._try_again(), context=contextvars.Context())

    def close(self) -> None:
        """Stop retrying to read."""
        if self._retry is not None:
            self._retry.cancel()

    def add(self, url: str, *, found: bool) -> None:
        """Add an endpoint; `found` if it is discovered, so that it only needs to be restored."""
        self._note(url)
        self.removed.discard(url)
        if not found:
            self.added.add(url)

    def remove(self, url: str, *, found: bool) -> None:
        """Remove an endpoint; `found` if it is discovered, so that the removal must be stored."""
        self._note(url)
        self.added.discard(url)
        if found:
            self.removed.add(url)

    async def save(self) -> bool:
        """Write the choices, and return whether they survive a restart of the application."""
        if self._store is None or self._calls is None:
            return False
        store, document = self._store, {"added": sorted(self.added), "removed": sorted(self.removed)}
        if not self._restored:
            logger.warning("event=endpoints_not_saved reason=%r", f"{store.path} has not been loaded yet")
            return False
        try:
            await self._calls.answer(lambda: store.save(document), SAVE_TIMEOUT_S)
        except StateError as exc:
            logger.warning("event=endpoints_not_saved reason=%r", str(exc))
            return False
        return store.outlives_cluster

    def _note(self, url: str) -> None:
        if not self._restored:
            self._chosen.add(url)

    async def _restore(self) -> None:
        assert self._store is not None, "requires a store"
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
