"""The store of learned state: one JSON document for each learner, on any file system that fsspec knows.

    {"format": "ewsjf-serve state", "version": 1, "kind": "scheduler", "name": "app/demo",
     "saved_at": "2026-01-31T12:00:00+00:00", "checksum": "sha256:...", "document": {...}}

Rules:

- A document is written completely or not at all. It gets a temporary name and is then renamed; an object
  store writes an object at once, and is written directly. Two concurrent writers do not mix: the last one
  counts.
- A document that cannot be trusted is not used: one that is truncated, altered, of another learner, or of
  another version. It is renamed to `*.refused`, replacing an earlier one, so that it can be inspected and the
  next start finds none. One log line states the reason.
- An unreachable store raises `StateError`, and the caller decides what to do.

Calls block on the file system, so they belong in a thread, as in `keeper`.
"""

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import fsspec.core
import msgspec

from serve_app.errors import ServeAppError

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")

_FORMAT = "ewsjf-serve state"
_VERSION = 1
# File systems that make an object visible only when all of it has been written.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
# Characters of the name's digest: enough that two names never share a file.
_DIGEST_CHARACTERS = 10


class StateError(ServeAppError):
    """The store of learned state could not be read or written."""


class _RefusedError(ValueError):
    """A document that must not be used; the message states the reason."""


class StateStore:
    """The state of one learner.

    Args:
        uri: a folder: an absolute path, or a URI that fsspec knows, such as `s3://bucket/folder`.
        kind: the kind of learner, such as `scheduler` or `tuner`.
        name: of the learner, with any characters; each name has a file of its own.

    Attributes:
        path: of the document, for messages.
    """

    def __init__(self, uri: str, kind: str, name: str) -> None:
        self._folder = uri.rstrip("/") or "/"
        self._kind, self._name = kind, name
        self.path = f"{self._folder.rstrip('/')}/{_file_name(kind, name)}"
        # Of the stored document, as far as this object knows: the same document is not written again.
        self._kept_checksum = ""

    def __repr__(self) -> str:
        return f"<StateStore {self.path}>"

    def load(self) -> Mapping[str, Any] | None:
        """The document that was saved last; None when there is none that can be used.

        Raises:
            StateError: the store is unreachable.
        """
        data = self._reached("read", self._read)
        if data is None:
            return None
        try:
            return self._opened(data)
        except _RefusedError as exc:
            self.refuse(str(exc))
            return None

    def save(self, document: Mapping[str, Any]) -> bool:
        """Replace the stored document; False when it is the same, which is not written.

        Args:
            document: dictionaries with text keys, lists, texts, numbers, booleans and None.

        Raises:
            StateError: the store is unreachable, or the document cannot be written as JSON.
        """
        checksum = self._checksum(document)
        if checksum == self._kept_checksum:
            return False
        envelope = {
            "format": _FORMAT,
            "version": _VERSION,
            "kind": self._kind,
            "name": self._name,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "checksum": checksum,
            "document": document,
        }
        data = msgspec.json.encode(envelope)
        self._reached("write", lambda: self._write(data))
        self._kept_checksum = checksum
        return True

    def refuse(self, reason: str) -> None:
        """Set the stored document aside, because it cannot be used, and log the reason."""
        self._kept_checksum = ""
        logger.error(
            "event=state_refused kind=%s name=%s path=%s reason=%r action=%r",
            self._kind,
            self._name,
            self.path,
            reason,
            f"starts fresh; the file is kept as {self.path}.refused",
        )
        try:
            self._reached("rename", self._set_aside)
        except StateError as exc:
            logger.warning("event=state_not_set_aside path=%s reason=%r", self.path, str(exc))

    # The document.

    def _checksum(self, document: Mapping[str, Any]) -> str:
        try:
            data = msgspec.json.encode((self._kind, self._name, document), order="deterministic")
        except (TypeError, ValueError, RecursionError) as exc:
            raise StateError(f"the state of {self._name} cannot be written as JSON: {exc}") from exc
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def _opened(self, data: bytes) -> Mapping[str, Any]:
        try:
            envelope = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise _RefusedError(f"no JSON, perhaps cut off: {exc}") from exc
        if not isinstance(envelope, dict) or envelope.get("format") != _FORMAT:
            raise _RefusedError(f"no {_FORMAT}")
        for key, ours in (("version", _VERSION), ("kind", self._kind), ("name", self._name)):
            if (theirs := envelope.get(key)) != ours:
                raise _RefusedError(f"{key} is {theirs!r} where {ours!r} belongs")
        document = envelope.get("document")
        if not isinstance(document, dict):
            raise _RefusedError("it holds no document")
        checksum = self._checksum(document)
        if envelope.get("checksum") != checksum:
            raise _RefusedError(f"the checksum does not match: {envelope.get('checksum')} for {checksum}")
        self._kept_checksum = checksum
        return document

    # The file system. It is resolved at every call, because that may fail while the network is down; fsspec
    # keeps the connections.

    def _reached(self, verb: str, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except StateError:
            raise
        except Exception as exc:
            # Each file system has its own errors, from OSError to those of its client library.
            raise StateError(f"cannot {verb} {self.path}: {type(exc).__name__}: {exc}") from exc

    def _place(self) -> tuple[Any, str]:
        system, path = fsspec.core.url_to_fs(self.path)
        return system, path

    def _read(self) -> bytes | None:
        system, path = self._place()
        try:
            data: bytes = system.cat_file(path)
        except FileNotFoundError:
            return None
        return data

    def _write(self, data: bytes) -> None:
        system, path = self._place()
        if not _OBJECT_STORES.isdisjoint(_protocols(system)):
            system.pipe_file(path, data)
            return
        system.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
        unfinished = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            system.pipe_file(unfinished, data)
            system.mv(unfinished, path)
        except BaseException:
            _remove(system, unfinished)
            raise

    def _set_aside(self) -> None:
        system, path = self._place()
        try:
            system.mv(path, f"{path}.refused")
        except FileNotFoundError:
            # Another process has renamed it at the same time.
            return


def _file_name(kind: str, name: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{kind}-{readable}-{digest}.json"


def _protocols(system: Any) -> set[str]:
    protocol = system.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _remove(system: Any, path: str) -> None:
    """Remove the temporary file of a failed write; the failure of the write itself is reported."""
    try:
        system.rm_file(path)
    except Exception as exc:  # noqa: BLE001 - see above
        logger.debug("event=state_temporary_file_left path=%s reason=%r", path, exc)
