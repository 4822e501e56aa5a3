"""Storage of the Batch API in one folder, opened on its first use, with calls that do not block.

Its folder may be on a network file system that hangs, which stops neither the gateway nor its exit.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, TypeVarTuple, Unpack

from serve_app.serving.daemon_threads import DaemonThreads
from serve_app.serving.gateway.batches.contents import Contents
from serve_app.serving.gateway.batches.store import BatchStore

T = TypeVar("T")
P = ParamSpec("P")
Arguments = TypeVarTuple("Arguments")

_DATABASE = "batches.sqlite"
# Concurrent calls to the file system of the contents.
_MAX_FILE_CALLS = 8


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
        self._thread = DaemonThreads(1, "batches")
        self._files = DaemonThreads(_MAX_FILE_CALLS, "batch-files")

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

    async def file_call(self, work: Callable[[Unpack[Arguments]], T], *args: *Arguments) -> T:
        """Call a method of `contents` or of one of its files.

        Raises:
            StoreError: it cannot be opened, read or written.
        """
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *args)

    def close(self) -> None:
        """Close the database after the calls in progress."""
        self._thread.submit(self._close)
        self._thread.shutdown()
        self._files.shutdown()

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
