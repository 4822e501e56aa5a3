"""A file of API keys: read as a whole, replaced as a whole.

A reader sees the old file or the new one, never a part. Writers of one machine take turns by a lock on the
folder. The file has the mode 0600: it holds no secrets, yet who may do what is nobody else's business.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from serve_app.api_keys.record import KeyRecord
from serve_app.errors import SettingsError

_FORMAT = "ewsjf-serve keys"
_VERSION = 1


class KeysFileError(SettingsError):
    """A file of keys cannot be read or written; the message names the place in it."""


class _KeysDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    keys: tuple[KeyRecord, ...]


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The keys in a file, in its order.

    Raises:
        KeysFileError: there is no such file, or something in it is wrong.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise KeysFileError(
            f"the keys in {path} cannot be read: {exc.strerror}; `python -m serve_app keys` writes them"
        ) from exc
    try:
        document = msgspec.json.decode(data, type=_KeysDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise KeysFileError(f"{path} is no file of keys: {exc}") from exc
    if (document.format, document.version) != (_FORMAT, _VERSION):
        found = f"format {document.format!r}, version {document.version}"
        raise KeysFileError(f"{path} has {found} where {_FORMAT!r}, version {_VERSION} belongs")
    ids = [key.id for key in document.keys]
    if twice := next((each for each in ids if ids.count(each) > 1), None):
        raise KeysFileError(f"{path} has the key {twice} twice, the second at `$.keys[{_last(ids, twice)}]`")
    return document.keys


def changed_keys(
    path: Path, change: Callable[[tuple[KeyRecord, ...]], Sequence[KeyRecord]]
) -> tuple[KeyRecord, ...]:
    """Change the keys in a file, which is made where there is none, and return the new ones.

    Raises:
        KeysFileError: it cannot be read or written.
    """
    # What a link points to is replaced, and the link stays.
    path = path.resolve()
    try:
        with _locked(path.parent):
            keys = tuple(change(read_keys(path) if path.exists() else ()))
            document = _KeysDocument(format=_FORMAT, version=_VERSION, keys=keys)
            _replace(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    except OSError as exc:
        raise KeysFileError(f"the keys in {path} cannot be written: {exc.strerror}") from exc
    return keys


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _last(ids: Sequence[str], key_id: str) -> int:
    return len(ids) - 1 - list(reversed(ids)).index(key_id)
