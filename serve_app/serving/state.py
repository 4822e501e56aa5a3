"""Learned state on disk or in a bucket: the store, calls that do not block, and the schedule of writes."""

import asyncio
import contextvars
import hashlib
import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import fsspec.core
import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from serve_app.errors import ServeAppError

# The store of learned state: one JSON document for each learner, on any file system that fsspec knows.
#
#     {"format": "ewsjf-serve state", "version": 1, "kind": "scheduler", "name": "app/demo",
#      "saved_at": "2026-01-31T12:00:00+00:00", "checksum": "sha256:...", "document": {...}}
#
# Rules:
#
# - A document is written completely or not at all. It gets a temporary name and is then renamed; an object
#   store writes an object at once, and is written directly. Two concurrent writers do not mix: the last one
#   counts.
# - A document that cannot be trusted is not used: one that is truncated, altered, of another learner, or of
#   another version. It is renamed to `*.refused`, replacing an earlier one, so that it can be inspected and
#   the next start finds none. One log line states the reason.
# - An unreachable store raises `StateError`, and the caller decides what to do.
#
# Calls block on the file system, so they belong in a thread, as in `keeper`.


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


# Calls to a store of learned state from an event loop, which must not wait for a file system.
#
# Each call has a thread of its own, one at a time, and a time limit. A call that hangs is abandoned, and no
# other begins until it returns. The threads are daemons, so that a call that hangs does not keep the process
# alive.


LOAD_TIMEOUT_S = 5.0
"""A local file takes milliseconds, an object store a tenth of a second; a start waits no longer than this."""
SAVE_TIMEOUT_S = 20.0


class StoreCalls:
    """The calls to one store."""

    def __init__(self, store: StateStore) -> None:
        self._path = store.path
        self._under_way: asyncio.Future[Any] | None = None

    def __repr__(self) -> str:
        waits = self._under_way is not None and not self._under_way.done()
        return f"<StoreCalls {self._path}{' waits' if waits else ''}>"

    async def answer(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """The store's answer, once earlier calls have returned.

        Raises:
            StateError: there is no answer in time, or `work` raised it.
        """
        before = self._under_way
        if before is not None:
            await asyncio.wait({before}, timeout=timeout_s)
            if not before.done():
                raise StateError(f"an earlier call has not returned from {self._path} yet")
        future = self.begin(work)
        await asyncio.wait({future}, timeout=timeout_s)
        if not future.done():
            raise StateError(f"no answer from {self._path} within {timeout_s:g} s")
        return future.result()

    def begin(self, work: Callable[[], Answer]) -> asyncio.Future[Answer]:
        """Call without waiting for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def run() -> None:
            try:
                answer = work()
            except BaseException as exc:  # noqa: BLE001 - the caller gets it
                tell(partial(future.set_exception, exc))
            else:
                tell(partial(future.set_result, answer))

        def tell(what: Callable[[], None]) -> None:
            try:
                loop.call_soon_threadsafe(what)
            except RuntimeError:
                # The event loop has ended meanwhile, and with it the caller.
                logger.debug("event=state_answer_dropped path=%s", self._path)

        self._under_way = future
        # An error after the time limit was reported as a time-out already.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        threading.Thread(target=run, name="learned-state", daemon=True).start()
        return future


# The schedule of learned state: it is read at the start, and written periodically and at the end.
#
# While a store is unreachable, nothing is kept. That is logged once until the store answers again, and
# counted.


Document = Mapping[str, Any]

# Serve ends a replica five seconds after it was told to stop.
_LAST_SAVE_TIMEOUT_S = 3.0


class StateKeeper:
    """Keeps the state of one learner; must be constructed on a running event loop.

    Args:
        store: reads and writes the state.
        model: label of the metrics.
        take: returns the present state, as plain values that do not change any more; called on the loop. None
            when there is nothing to keep.
        interval_s: between two writes; an unchanged state is not written.
    """

    def __init__(
        self, store: StateStore, model: str, take: Callable[[], Document | None], interval_s: float
    ) -> None:
        self._store, self._take, self._interval_s = store, take, interval_s
        self._loop = asyncio.get_running_loop()
        self._calls = StoreCalls(store)
        self._is_unreachable = False
        self._task: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry()
        labels = ("model",)
        text = "Reads and writes of learned state that failed."
        failures = Counter("ewsjf_state_failures", text, (*labels, "operation"), registry=self._registry)
        self._failures = {verb: failures.labels(model, verb) for verb in ("load", "save", "restore")}
        text = "When learned state was last found saved, in seconds since 1970."
        self._saved_at = Gauge("ewsjf_state_saved_timestamp_seconds", text, labels, registry=self._registry)
        self._saved_at = self._saved_at.labels(model)

    def __repr__(self) -> str:
        return f"<StateKeeper {self._store.path}{' unreachable' if self._is_unreachable else ''}>"

    @property
    def is_unreachable(self) -> bool:
        """Whether the last call to the store failed."""
        return self._is_unreachable

    async def load(self) -> Document | None:
        """The last saved state; None when there is none, it cannot be used, or the store is unreachable."""
        try:
            return await self._call(self._store.load, LOAD_TIMEOUT_S)
        except StateError as exc:
            self._failed("load", exc)
            return None

    def start(self) -> None:
        """Save periodically until `close`; a second call has no effect."""
        if self._task is not None:
            return
        # In an empty context: Serve cancels a task that was started in the context of a request with it.
        self._task = self._loop.create_task(self._run(), context=contextvars.Context())

    async def save(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Save the present state."""
        try:
            document = self._take()
            if document is None:
                return
            await self._call(lambda: self._store.save(document), timeout_s)
        except StateError as exc:
            self._failed("save", exc)
        else:
            self._saved_at.set_to_current_time()

    async def close(self) -> None:
        """Save a last time, if the store answers soon."""
        if self._task is not None:
            self._task.cancel()
        await self.save(_LAST_SAVE_TIMEOUT_S)

    def refused(self, reason: str) -> None:
        """Set aside a loaded state that cannot be used, without waiting for it."""
        self._failures["restore"].inc()
        self._calls.begin(lambda: self._store.refuse(reason))

    def exposition(self) -> str:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry).decode()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    def _failed(self, operation: str, error: StateError) -> None:
        self._failures[operation].inc()
        if not self._is_unreachable:
            logger.warning(
                "event=state_unreachable operation=%s path=%s reason=%r", operation, self._store.path, error
            )
        self._is_unreachable = True

    async def _call(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """The store's answer, once earlier calls have returned.

        Raises:
            StateError: there is no answer in time.
        """
        answer = await self._calls.answer(work, timeout_s)
        if self._is_unreachable:
            logger.info("event=state_reachable path=%s", self._store.path)
        self._is_unreachable = False
        return answer
