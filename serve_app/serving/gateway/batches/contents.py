"""Contents of files, on any file system that fsspec supports. Calls block, so they belong in a thread."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import fsspec.core

from serve_app.serving.gateway.batches.store import StoreError


class Contents:
    """Files by id in one folder.

    Args:
        uri: the folder: an absolute path, or a URI that fsspec supports.

    Raises:
        StoreError: a file cannot be read or written; every method may raise it.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    def __repr__(self) -> str:
        return f"<Contents {self._uri}>"

    def create(self, file_id: str) -> "Writer":
        """Create or replace a file."""
        return Writer(self, file_id)

    def open(self, file_id: str, mode: str = "rb") -> IO[bytes]:
        """Open a file."""
        with self.errors(file_id):
            system, path = fsspec.core.url_to_fs(f"{self._uri}/{file_id}")
            if mode == "wb":
                system.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            file: IO[bytes] = system.open(path, mode)
            return file

    def delete(self, file_id: str) -> None:
        """Delete a file; a missing one is no error."""
        with self.errors(file_id), contextlib.suppress(FileNotFoundError):
            system, path = fsspec.core.url_to_fs(f"{self._uri}/{file_id}")
            system.rm_file(path)

    @contextmanager
    def errors(self, file_id: str) -> Iterator[None]:
        """Raise the errors of the file system as `StoreError`."""
        try:
            yield
        except (StoreError, FileNotFoundError):
            raise
        except Exception as error:
            # Each file system raises its own errors, from OSError to those of its client library.
            raise StoreError(f"{self._uri}/{file_id}: {error}") from error


class Writer:
    """A file that is being written."""

    def __init__(self, contents: Contents, file_id: str) -> None:
        self._contents, self._file_id = contents, file_id
        self._file = contents.open(file_id, "wb")
        self.bytes = 0

    def write(self, data: bytes) -> None:
        """Append data."""
        with self._contents.errors(self._file_id):
            self._file.write(data)
        self.bytes += len(data)

    def close(self) -> None:
        """Complete the file: it survives a failure of the machine from now on."""
        with self._contents.errors(self._file_id):
            self._file.flush()
            with contextlib.suppress(AttributeError, OSError):
                # Files of object stores have no descriptor, and are durable once closed.
                os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Delete the file."""
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(StoreError):
            self._contents.delete(self._file_id)
