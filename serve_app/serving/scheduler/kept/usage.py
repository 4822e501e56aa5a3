"""The ledger of usage with its place in the store, beside what the scheduler has learned.

What was learned may be thrown away when it does not fit; usage may not. So it has a document of its own. And
while the store cannot be read at the start, nothing is written over what it holds: the ledger counts from
nothing, and what was stored is added once it can be read.
"""

import asyncio
import contextvars
from collections.abc import Mapping
from typing import Any

from serve_app.serving.scheduler.usage_ledger import USAGE_KIND, UsageLedger
from serve_app.serving.state import StateKeeper, StateStore


class KeptUsage:
    """The ledger of one model; must be constructed on a running event loop.

    Args:
        state_uri: see `StateStore`; None keeps nothing.
        scope: unique to the application and model.

    Attributes:
        ledger: what is counted.
    """

    def __init__(self, model: str, state_uri: str | None, scope: str, interval_s: float) -> None:
        self.ledger = UsageLedger(model)
        self._model, self._interval_s = model, interval_s
        self._keeper: StateKeeper | None = None
        self._restored = False
        self._retry: asyncio.Task[None] | None = None
        if state_uri is not None:
            store = StateStore(state_uri, USAGE_KIND, scope)
            self._keeper = StateKeeper(store, model, self._take, interval_s)

    def __repr__(self) -> str:
        return f"<KeptUsage {self.ledger}>"

    async def load(self) -> None:
        """Read what was stored; while the store is unreachable, try again in the background."""
        if self._keeper is None or self._restored or self._retry is not None:
            return
        if not await self._restore(self._keeper):
            loop = asyncio.get_running_loop()
            self._retry = loop.create_task(self._try_again(self._keeper), context=contextvars.Context())

    def start(self) -> None:
        """Save periodically."""
        if self._keeper is not None:
            self._keeper.start()

    async def save(self) -> None:
        """Save now."""
        if self._keeper is not None:
            await self._keeper.save()

    async def close(self) -> None:
        """Save a last time."""
        keeper, self._keeper = self._keeper, None
        if self._retry is not None:
            self._retry.cancel()
        if keeper is not None:
            await keeper.close()

    def shown(self) -> dict[str, Any]:
        """Every line, for people and bills."""
        return {"model": self._model, "rows": self.ledger.rows()}

    def _take(self) -> Mapping[str, Any] | None:
        return self.ledger.state() if self._restored else None

    async def _restore(self, keeper: StateKeeper) -> bool:
        document = await keeper.load()
        if keeper.is_unreachable:
            return False
        self._restored = True
        if document is not None:
            try:
                self.ledger.add_stored(document)
            except (ValueError, TypeError, AttributeError) as exc:
                keeper.refused(str(exc))
        return True

    async def _try_again(self, keeper: StateKeeper) -> None:
        while not self._restored:
            await asyncio.sleep(self._interval_s)
            await self._restore(keeper)
