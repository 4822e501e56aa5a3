"""Learned state on disk or in a bucket: one document per learner, and when it is written.

- `StateStore`: one JSON document per learner, on any file system that fsspec supports.
- `StoreCalls`: calls to a store from an event loop, which must not wait for a file system. They are made one
  at a time, each with a time limit. A call that hangs is abandoned, and no other one starts until it returns.
- `StatePersister`: reads state at the start, and writes it periodically and at the end. While a store is
  unreachable, nothing is persisted; failures are counted, and logged once until the store answers again.

`StateStore`. A document:

    {"format": "ewsjf-serve state", "version": 1, "kind": "scheduler", "name": "app/demo",
     "saved_at": "2026-01-31T12:00:00+00:00", "checksum": "sha256:...", "document": {...}}

Rules:

- Writes are atomic: a document has a temporary name until it is renamed. Object stores write an object
  atomically, so they are written directly. Of two concurrent writers, the last one wins.
- A document that is truncated, altered, of another learner or of another version is not used. It is renamed
  to `*.rejected`, replacing an earlier one, so that it can be inspected and the next start finds none. One
  log line has the reason.
- An unreachable store raises `StateError`, and the caller decides what to do.

Calls block on the file system, so they belong in a thread; see `StoreCalls`.
"""

import asyncio
import contextvars
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import fsspec.core
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from serve_app.errors import ServeAppError
from serve_app.serving.process import DaemonThreads

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")

_FORMAT = "ewsjf-serve state"
_VERSION = 1
# File systems whose writes of an object are atomic.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
# Length of the name's digest: enough that two names never share a file.
_DIGEST_CHARACTERS = 10


class StateError(ServeAppError):
    """The store of learned state could not be read or written."""


class _RejectedError(ValueError):
    """A document that must not be used; the message has the reason."""


class StateStore:
    """Persistent state of one learner.

    Args:
        uri: a folder: an absolute path, or a URI that fsspec supports, such as `s3://bucket/folder`.
        kind: kind of learner, such as `scheduler` or `tuner`.
        name: name of the learner, with any characters; each name has its own file.

    Attributes:
        path: path of the document, for messages.
        outlives_cluster: documents survive a restart of Ray.
    """

    outlives_cluster = True

    def __init__(self, uri: str, kind: str, name: str) -> None:
        self._folder = uri.rstrip("/") or "/"
        self._kind, self._name = kind, name
        self.path = f"{self._folder.rstrip('/')}/{_file_name(kind, name)}"
        # Checksum of the stored document as far as known; an unchanged document is not written again.
        self._stored_checksum = ""

    def __repr__(self) -> str:
        return f"<StateStore {self.path}>"

    def load(self) -> Mapping[str, Any] | None:
        """Return the last saved document; None if there is no usable one.

        Raises:
            StateError: the store is unreachable.
        """
        data = self._guarded("read", self._read)
        if data is None:
            return None
        try:
            return self._decoded(data)
        except _RejectedError as exc:
            self.reject(str(exc))
            return None

    def save(self, document: Mapping[str, Any]) -> bool:
        """Replace the stored document; return False if it is unchanged and was not written.

        Args:
            document: dictionaries with text keys, lists, texts, numbers, booleans and None.

        Raises:
            StateError: the store is unreachable, or the document cannot be encoded as JSON.
        """
        checksum = self._checksum(document)
        if checksum == self._stored_checksum:
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
        self._guarded("write", lambda: self._write(data))
        self._stored_checksum = checksum
        return True

    def reject(self, reason: str) -> None:
        """Rename the stored document, because it cannot be used, and log the reason."""
        self._stored_checksum = ""
        logger.error(
            "event=state_rejected kind=%s name=%s path=%s reason=%r action=%r",
            self._kind,
            self._name,
            self.path,
            reason,
            f"starting without it; renamed to {self.path}.rejected",
        )
        try:
            self._guarded("rename", self._rename_rejected)
        except StateError as exc:
            logger.warning("event=state_rename_failed path=%s reason=%r", self.path, str(exc))

    # Documents.

    def _checksum(self, document: Mapping[str, Any]) -> str:
        try:
            data = msgspec.json.encode((self._kind, self._name, document), order="deterministic")
        except (TypeError, ValueError, RecursionError) as exc:
            raise StateError(f"the state of {self._name} cannot be written as JSON: {exc}") from exc
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def _decoded(self, data: bytes) -> Mapping[str, Any]:
        try:
            envelope = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise _RejectedError(f"not JSON, perhaps truncated: {exc}") from exc
        if not isinstance(envelope, dict) or envelope.get("format") != _FORMAT:
            raise _RejectedError(f"not {_FORMAT}")
        for key, ours in (("version", _VERSION), ("kind", self._kind), ("name", self._name)):
            if (theirs := envelope.get(key)) != ours:
                raise _RejectedError(f"{key} is {theirs!r}, expected {ours!r}")
        document = envelope.get("document")
        if not isinstance(document, dict):
            raise _RejectedError("the field document is missing")
        checksum = self._checksum(document)
        if envelope.get("checksum") != checksum:
            raise _RejectedError(f"checksum is {envelope.get('checksum')}, expected {checksum}")
        self._stored_checksum = checksum
        return document

    # File system. Resolved at every call, because that fails without a network; fsspec caches connections.

    def _guarded(self, verb: str, work: Callable[[], Answer]) -> Answer:
        try:
            return work()
        except StateError:
            raise
        except Exception as exc:
            # Each file system raises its own errors, from OSError to those of its client library.
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

    def _rename_rejected(self) -> None:
        system, path = self._place()
        try:
            system.mv(path, f"{path}.rejected")
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
    """Remove the temporary file of a failed write; the error of the write itself is reported."""
    try:
        system.rm_file(path)
    except Exception as exc:  # noqa: BLE001 - see above
        logger.debug("event=state_temporary_file_not_removed path=%s reason=%r", path, exc)


LOAD_TIMEOUT_S = 5.0
"""Limit of a start's wait; a local file takes milliseconds, an object store a tenth of a second."""
SAVE_TIMEOUT_S = 20.0


Document = Mapping[str, Any]


class StoreCalls:
    """Non-blocking calls to one store."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._thread = DaemonThreads(1, "learned-state")
        self._running: asyncio.Future[Any] | None = None

    def __repr__(self) -> str:
        waits = self._running is not None and not self._running.done()
        return f"<StoreCalls {self._store.path}{' waits' if waits else ''}>"

    async def load(self) -> Document | None:
        """Return the stored document; None if there is none.

        Raises:
            StateError: the store did not answer in time, or failed.
        """
        return await self._answer(self._store.load, LOAD_TIMEOUT_S)

    async def save(self, document: Document, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Write a document.

        Raises:
            StateError: the store did not answer in time, or failed.
        """
        await self._answer(lambda: self._store.save(document), timeout_s)

    def reject(self, reason: str) -> None:
        """Rename a loaded document that cannot be used, without waiting."""
        self._begin(lambda: self._store.reject(reason))

    async def _answer(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """Run a call once earlier ones have returned, and return its result."""
        before = self._running
        if before is not None:
            await asyncio.wait({before}, timeout=timeout_s)
            if not before.done():
                raise StateError(f"an earlier call has not returned from {self._store.path} yet")
        future = self._begin(work)
        await asyncio.wait({future}, timeout=timeout_s)
        if not future.done():
            raise StateError(f"no response from {self._store.path} within {timeout_s:g} s")
        return future.result()

    def _begin(self, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        """Start a call without waiting for it."""
        self._running = future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        # An error after the time limit has already been reported as a timeout.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future


# Serve ends a replica five seconds after it requested a stop.
_LAST_SAVE_TIMEOUT_S = 3.0


class StatePersister:
    """Persistence of one learner's state; must be constructed on a running event loop.

    Args:
        store: reads and writes the state.
        model: label of the metrics.
        snapshot: returns the current state as plain values that no longer change, or None if there is nothing
            to persist; called on the event loop.
        interval_s: time between two writes, in seconds; an unchanged state is not written.
        registry: exports the metrics; None for none.
    """

    def __init__(
        self,
        store: StateStore,
        model: str,
        snapshot: Callable[[], Document | None],
        interval_s: float,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._path, self._snapshot, self._interval_s = store.path, snapshot, interval_s
        self._loop = asyncio.get_running_loop()
        self._calls = StoreCalls(store)
        self._is_unreachable = False
        self._task: asyncio.Task[None] | None = None
        labels = ("model",)
        text = "Failed reads and writes of learned state."
        failures = Counter("ewsjf_state_failures", text, (*labels, "operation"), registry=registry)
        self._failures = {verb: failures.labels(model, verb) for verb in ("load", "save", "restore")}
        text = "Time of the last save of learned state, initially of the start, in seconds since 1970."
        self._saved_at = Gauge("ewsjf_state_saved_timestamp_seconds", text, labels, registry=registry)
        self._saved_at = self._saved_at.labels(model)
        self._saved_at.set_to_current_time()

    def __repr__(self) -> str:
        return f"<StatePersister {self._path}{' unreachable' if self._is_unreachable else ''}>"

    async def load(self, restore: Callable[[Document], None]) -> bool:
        """Restore the last saved state, if there is one, and return whether the store has answered.

        Args:
            restore: raises `ValueError` or `OverflowError` for a state that cannot be used, which is renamed.
        """
        try:
            document = await self._reached(self._calls.load())
        except StateError as exc:
            self._failed("load", exc)
            return False
        if document is not None:
            try:
                restore(document)
            except (ValueError, OverflowError) as exc:
                self._rejected(str(exc))
        return True

    def start(self) -> None:
        """Save periodically until `close`. Idempotent."""
        if self._task is not None:
            return
        # In an empty context, because Serve cancels the tasks of a request's context with the request.
        self._task = self._loop.create_task(self._run(), context=contextvars.Context())

    async def save(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Save the current state."""
        try:
            document = self._snapshot()
            if document is None:
                return
            await self._reached(self._calls.save(document, timeout_s))
        except StateError as exc:
            self._failed("save", exc)
        else:
            self._saved_at.set_to_current_time()

    async def close(self) -> None:
        """Save a last time, if the store answers quickly."""
        if self._task is not None:
            self._task.cancel()
        await self.save(_LAST_SAVE_TIMEOUT_S)

    def _rejected(self, reason: str) -> None:
        """Rename a loaded state that cannot be used, without waiting."""
        self._failures["restore"].inc()
        self._calls.reject(reason)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    def _failed(self, operation: str, error: StateError) -> None:
        self._failures[operation].inc()
        if not self._is_unreachable:
            logger.warning(
                "event=state_unreachable operation=%s path=%s reason=%r", operation, self._path, error
            )
        self._is_unreachable = True

    async def _reached(self, call: Awaitable[Answer]) -> Answer:
        """Return the result of a call to the store, which has answered after an outage."""
        answer = await call
        if self._is_unreachable:
            logger.info("event=state_reachable path=%s", self._path)
        self._is_unreachable = False
        return answer
