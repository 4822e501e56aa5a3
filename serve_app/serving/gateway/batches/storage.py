"""Storage of the Batch API in one folder, opened on its first use, with calls that do not block."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from serve_app.serving.gateway.batches.contents import Contents
from serve_app.serving.gateway.batches.store import BatchStore

T = TypeVar("T")
P = ParamSpec("P")

_DATABASE = "batches.sqlite"


class Storage:
    """The database and the contents of files.

    Args:
        folder: folder of the database.
        files_uri: folder of the contents; by default one in `folder`.
    """

    def __init__(self, folder: Path, files_uri: str | None = None) -> None:
        self.contents = Contents(files_uri or str(folder / "files"))
        self._path = folder / _DATABASE
        self._store: BatchStore | None = None
        self._thread = ThreadPoolExecutor(1, "batches")

    def __repr__(self) -> str:
        return f"<Storage {self._path}>"

    async def is_new(self) -> bool:
        """Return whether no gateway has stored anything yet."""
        if self._store is not None:
            return False
        # In the thread as well, because a file system that hangs must not stop the gateway.
        loop = asyncio.get_running_loop()
        return not await loop.run_in_executor(self._thread, self._path.exists)

    async def __call__(
        self, work: Callable[Concatenate[BatchStore, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the database.

        Raises:
            StoreError: it cannot be opened, read or written.
        """

        def call() -> T:
            if self._store is None:
                self._store = BatchStore(self._path)
            return work(self._store, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Close the database after the calls in progress."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
