"""Storage of the Batch API: its database with the lease of the runner, and the contents of files.

- `BatchStore`: an SQLite database that all gateways of an application open. Its write-ahead log needs shared
  memory, which network file systems lack, so a rollback journal is used there.
- `Contents`: files, on any file system that fsspec supports. Calls block, so they belong in a thread.
- `Storage`: both in one folder, opened on its first use, with calls that do not block. The folder may be on a
  network file system that hangs, which stops neither the gateway nor its exit.
- `FileRecord`, `BatchRecord`: files and batches as they are stored and shown.

`BatchStore`. Rules:

- A request of a batch has at most one result: the first one that is stored.
- Only the holder of the lease changes an open batch, except for the request to cancel it. Each holder has a
  higher number than the one before (a fencing token, as in Burrows, "The Chubby lock service", 2006), which
  is compared in the transaction of each change. So a runner that was suspended cannot disturb its successor.
- Calls block, so they belong in a thread. A connection is used by one thread at a time.

`BatchRecord`. A batch passes through these states:

    validating -> failed: its input does not fit its endpoint
    validating -> in_progress -> finalizing -> completed
                                            -> expired: its completion window ended
                  in_progress -> cancelling -> finalizing -> cancelled

The shape of the documents is OpenAI's (`FileObject` and `Batch` of its API reference).
"""

import asyncio
import contextlib
import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, Unpack

import fsspec.core
import msgspec
import psutil

from serve_app.errors import ServeAppError
from serve_app.serving.process import DaemonThreads

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""States of batches that have work left."""

LONGEST_WINDOW_S = 24 * 3600
_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}


class FileRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file.

    Attributes:
        owner: tenant that may use it.
        bytes: its length.
        created_at: seconds since the epoch, as all times here.
        is_complete: whether its contents are written.
        requests: number of requests in an input file.
        first_lines: line of the first request to each endpoint of an input file.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    bytes: int = 0
    is_complete: bool = False
    expires_at: int | None = None
    requests: int = 0
    first_lines: dict[str, int] = {}

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's `FileObject`."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed" if self.is_complete else "uploaded",
            "status_details": None,
        }


class Tokens(msgspec.Struct):
    """Tokens of the completed requests of a batch."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def add(self, other: "Tokens") -> None:
        """Add the tokens of further requests."""
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output


class BatchError(msgspec.Struct):
    """Why a batch failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch.

    Attributes:
        owner: tenant that may use it, and that its requests belong to.
        key_id: API key that created it; empty if none was needed.
        keep_output_s: time after which its output is deleted.
        reached: time at which it entered each state.
        total: number of its requests.
        completed, failed: requests with an answer, and with an error.
        rate_per_s: requests that end per second, lately.
        is_expired: whether its completion window ended before its requests.
        output_file_id, error_file_id: empty until they are chosen.
    """

    id: str
    owner: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    keep_output_s: int
    status: Status = "validating"
    reached: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    rate_per_s: float = 0.0
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    errors: list[BatchError] = []
    metadata: dict[str, str] | None = None
    is_expired: bool = False
    output_file_id: str = ""
    error_file_id: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has work left."""
        return self.status in OPEN

    @property
    def remaining(self) -> int:
        """Number of requests that have not ended."""
        return self.total - self.completed - self.failed

    def enter(self, status: Status, now: float) -> None:
        """Enter a state."""
        self.status = status
        self.reached = {**self.reached, status: int(now)}

    def expected_end_at(self, now: float) -> int | None:
        """Return when it is expected to end at its present rate; None if that is not known."""
        if self.status != "in_progress" or self.rate_per_s <= 0:
            return None
        return int(now + self.remaining / self.rate_per_s)

    def shown(self, now: float) -> dict[str, Any]:
        """Return OpenAI's `Batch`, and `expected_end_at`."""
        tokens = self.tokens
        times = {f"{state}_at": self.reached.get(state) for state in (*OPEN[1:], "completed", "failed")}
        times |= {f"{state}_at": self.reached.get(state) for state in ("expired", "cancelled")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            # The files exist once the batch has ended.
            "output_file_id": None if self.is_open else self.output_file_id or None,
            "error_file_id": None if self.is_open else self.error_file_id or None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": tokens.prompt,
                "input_tokens_details": {"cached_tokens": tokens.cached},
                "output_tokens": tokens.output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens.prompt + tokens.output,
            },
            "metadata": self.metadata,
            "expected_end_at": self.expected_end_at(now),
        }


def new_id(kind: str) -> str:
    """Return a new id, such as `batch_…`, that cannot be guessed."""
    return f"{kind}{secrets.token_hex(16)}"


def window_s(written: str) -> int | None:
    """Return a completion window such as `24h` or `30m` in seconds; None if it is not one."""
    found = _WINDOW.fullmatch(written)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found is not None else 0
    return seconds if 0 < seconds <= LONGEST_WINDOW_S else None


Record = TypeVar("Record", FileRecord, BatchRecord)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER, document BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    is_open INTEGER NOT NULL, document BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS open_batches ON batches (number) WHERE is_open;
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, output BLOB NOT NULL,
    UNIQUE (batch, line));
CREATE TABLE IF NOT EXISTS lease (
    one INTEGER PRIMARY KEY CHECK (one = 1), holder TEXT NOT NULL, token INTEGER NOT NULL,
    expires_at REAL NOT NULL);
"""
_VERSION = 1
_BUSY_TIMEOUT_S = 5.0
# Results that are read at once.
_PAGE = 200
# Files and batches that are deleted at once.
_SWEPT_TOGETHER = 1_000
_NETWORK_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "ceph", "lustre", "gluster", "beegfs", "9p", "afs")

_file_decoder = msgspec.json.Decoder(FileRecord)
_batch_decoder = msgspec.json.Decoder(BatchRecord)


class StoreError(ServeAppError):
    """The database or a file cannot be read or written, for example because the disk is full."""


class LeaseLost(StoreError):  # noqa: N818 - the normal end of a runner whose gateway was suspended
    """Another gateway runs the batches now."""


@dataclass(frozen=True, slots=True)
class Result:
    """The end of one request of a batch.

    Attributes:
        line: its line in the input file, from 1.
        output: its line in the output or error file, without the line break.
    """

    line: int
    is_error: bool
    output: bytes
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list: at most `limit` entries after the one with the id `after`."""

    limit: int
    after: str | None = None
    newest_first: bool = True


class BatchStore:
    """Files and batches of an application.

    Args:
        path: the database; created if it is missing.

    Raises:
        StoreError: it cannot be opened; every method may raise it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute(f"PRAGMA journal_mode = {'DELETE' if is_on_network(path) else 'WAL'}")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise StoreError(f"{path} has version {version}, and this release reads {_VERSION}")
            self._db.executescript(f"{_SCHEMA} PRAGMA user_version = {_VERSION};")

    def __repr__(self) -> str:
        return f"<BatchStore {self.path}>"

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # -- files

    def put_file(self, record: FileRecord) -> None:
        """Add or replace a file."""
        with self._transaction() as db:
            _put_file(db, record)

    def put_upload(self, record: FileRecord, max_stored_bytes: int, max_files: int) -> int:
        """Add or replace a file that a client uploads, and return the bytes of its owner's other files.

        Raises:
            QuotaExceeded: the owner's files would exceed a limit.
        """
        with self._transaction() as db:
            count, used = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ? AND id != ?",
                (record.owner, record.id),
            ).fetchone()
            if count >= max_files:
                raise QuotaExceeded(f"you have {count:,} files, the limit: delete files")
            check_quota(used, record.bytes, max_stored_bytes)
            _put_file(db, record)
        return int(used)

    def file(self, file_id: str, owner: str) -> FileRecord | None:
        """Return a complete file of a tenant; None if there is none."""
        record = self._one("SELECT document FROM files WHERE id = ? AND owner = ?", file_id, owner)
        found = None if record is None else _file_decoder.decode(record)
        return found if found is not None and found.is_complete else None

    def files(self, owner: str, purpose: str | None, page: Page) -> list[FileRecord]:
        """Return files of a tenant."""
        # The bytes of a file are set when it is complete.
        condition = "AND bytes > 0 AND (? IS NULL OR purpose = ?)"
        rows = self._page("files", owner, page, condition, (purpose, purpose))
        return [_file_decoder.decode(row) for row in rows]

    def delete_file(self, file_id: str) -> None:
        """Delete the record of a file."""
        with self._transaction() as db:
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expired_files(self, now: float, abandoned_before: float) -> list[str]:
        """Return files to delete: some of those that have expired, unless an open batch reads them.

        Args:
            abandoned_before: uploads that began before and were not completed have expired.
        """
        with _errors(self.path):
            rows = self._db.execute(
                "SELECT id FROM files WHERE id NOT IN"
                " (SELECT json_extract(CAST(document AS TEXT), '$.input_file_id') FROM batches WHERE is_open)"
                " AND (expires_at <= ?"
                " OR (bytes = 0 AND json_extract(CAST(document AS TEXT), '$.created_at') < ?)) LIMIT ?",
                (now, abandoned_before, _SWEPT_TOGETHER),
            )
            return [file_id for (file_id,) in rows]

    def uses(self, file_id: str) -> str | None:
        """Return an open batch that reads a file; None if there is none."""
        query = (
            "SELECT id FROM batches WHERE is_open"
            " AND json_extract(CAST(document AS TEXT), '$.input_file_id') = ?"
        )
        found: str | None = self._one(query, file_id)
        return found

    # -- batches

    def add_batch(self, record: BatchRecord, max_open: int | None = None) -> None:
        """Add a batch.

        Raises:
            TooManyBatches: the owner has `max_open` open batches.
        """
        with self._transaction() as db:
            query = "SELECT COUNT(*) FROM batches WHERE is_open AND owner = ?"
            if max_open is not None and db.execute(query, (record.owner,)).fetchone()[0] >= max_open:
                raise TooManyBatches(
                    f"you have {max_open:,} batches that have not ended, the limit: wait for the end of one, "
                    "cancel one, or raise gateway.batches.advanced.max_open_batches"
                )
            db.execute(
                "INSERT INTO batches (id, owner, is_open, document) VALUES (?, ?, ?, ?)",
                (record.id, record.owner, record.is_open, msgspec.json.encode(record)),
            )

    def batch(self, batch_id: str, owner: str) -> BatchRecord | None:
        """Return a batch of a tenant; None if there is none."""
        found = self._one("SELECT document FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        return None if found is None else _batch_decoder.decode(found)

    def batches(self, owner: str, page: Page) -> list[BatchRecord]:
        """Return batches of a tenant."""
        return [_batch_decoder.decode(row) for row in self._page("batches", owner, page)]

    def last_batches(self, limit: int) -> list[BatchRecord]:
        """Return the newest batches of all tenants."""
        with _errors(self.path):
            rows = self._db.execute(
                "SELECT document FROM batches ORDER BY number DESC LIMIT ?", (limit,)
            ).fetchall()
        return [_batch_decoder.decode(row) for (row,) in rows]

    def runnable(self, now: float, limit: int) -> list[BatchRecord]:
        """Return open batches to run: those that end, then each tenant's oldest, its second, and so on."""
        # Only the chosen documents are read, because there may be very many open batches.
        query = """
            WITH open_ones AS (
                SELECT number, owner, json_extract(CAST(document AS TEXT), '$.expires_at') <= ?
                    OR IFNULL(json_extract(CAST(document AS TEXT), '$.status'), 'validating')
                    NOT IN ('validating', 'in_progress') AS ends
                FROM batches WHERE is_open),
            chosen AS (
                SELECT number,
                    IIF(ends, 0, ROW_NUMBER() OVER (PARTITION BY owner, ends ORDER BY number)) AS place
                FROM open_ones ORDER BY place, number LIMIT ?)
            SELECT document FROM chosen JOIN batches USING (number) ORDER BY place, number"""
        with _errors(self.path):
            return [_batch_decoder.decode(row) for (row,) in self._db.execute(query, (now, limit))]

    def delete_ended(self, before: float) -> None:
        """Delete some of the batches that have ended and whose completion window ended before a time."""
        # The oldest have the lowest numbers, and a window is at most a day, so none of them waits for long.
        with self._transaction() as db:
            db.execute(
                "DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE NOT is_open"
                " ORDER BY number LIMIT ?) AND json_extract(CAST(document AS TEXT), '$.expires_at') < ?",
                (_SWEPT_TOGETHER, before),
            )

    def cancel(self, batch_id: str, owner: str, now: float) -> BatchRecord | None:
        """Request that a batch ends; return it, or None if there is none. Batches that have ended remain."""
        with self._transaction() as db:
            found = self.batch(batch_id, owner)
            if found is not None and found.status in ("validating", "in_progress"):
                found.enter("cancelling", now)
                _put_batch(db, found)
        return found

    # -- the runner

    def acquire(self, holder: str, now: float, lease_s: float) -> int | None:
        """Acquire or extend the lease; return its token, or None if another holder has it."""
        with self._transaction() as db:
            row = db.execute("SELECT holder, token, expires_at FROM lease").fetchone()
            held_by, token, expires_at = row or ("", 0, 0.0)
            if held_by != holder:
                if expires_at > now:
                    return None
                token += 1
            db.execute("INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)", (holder, token, now + lease_s))
            return int(token)

    def release(self, holder: str) -> None:
        """End a lease, so that another gateway need not wait for its end."""
        with self._transaction() as db:
            db.execute("UPDATE lease SET expires_at = 0 WHERE holder = ?", (holder,))

    def change(self, token: int, batch_id: str, change: Callable[[BatchRecord], object]) -> BatchRecord:
        """Change an open batch under the lease, and return it.

        Raises:
            LeaseLost: the lease has another token.
        """
        with self._leased(token) as db:
            record = self._open(batch_id)
            change(record)
            _put_batch(db, record)
        return record

    def add_results(self, token: int, batch_id: str, results: Iterable[Result]) -> BatchRecord:
        """Store results of an open batch, except those of lines that have one, and return the batch.

        Raises:
            LeaseLost: the lease has another token.
        """
        with self._leased(token) as db:
            record = self._open(batch_id)
            for result in results:
                is_new = db.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
                    (batch_id, result.line, result.is_error, result.output),
                ).rowcount
                if is_new:
                    record.completed += not result.is_error
                    record.failed += result.is_error
                    record.tokens.add(result.tokens)
            _put_batch(db, record)
        return record

    def lines_with_result(self, batch_id: str, first: int, last: int) -> set[int]:
        """Return the lines of a batch, from `first` to `last`, that have a result."""
        with _errors(self.path):
            query = "SELECT line FROM results WHERE batch = ? AND line BETWEEN ? AND ?"
            return {line for (line,) in self._db.execute(query, (batch_id, first, last))}

    def outputs(self, batch_id: str, after: int, *, errors: bool) -> Sequence[tuple[int, bytes]]:
        """Return the next lines of an output or error file, in the order of the input."""
        with _errors(self.path):
            return self._db.execute(
                "SELECT line, output FROM results WHERE batch = ? AND is_error = ? AND line > ?"
                " ORDER BY line LIMIT ?",
                (batch_id, errors, after, _PAGE),
            ).fetchall()

    def complete(
        self, token: int, batch_id: str, files: Iterable[FileRecord], end: Callable[[BatchRecord], object]
    ) -> BatchRecord:
        """End a batch whose files are written, and delete its results.

        Raises:
            LeaseLost: the lease has another token.
        """
        with self._leased(token) as db:
            record = self._open(batch_id)
            for each in files:
                _put_file(db, each)
            end(record)
            _put_batch(db, record)
            db.execute("DELETE FROM results WHERE batch = ?", (batch_id,))
        return record

    # -- SQL

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has ended the transaction itself after some errors, such as a full disk.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _leased(self, token: int) -> Iterator[sqlite3.Connection]:
        with self._transaction() as db:
            row = db.execute("SELECT token FROM lease").fetchone()
            if row is None or row[0] != token:
                raise LeaseLost("another gateway runs the batches now")
            yield db

    def _open(self, batch_id: str) -> BatchRecord:
        found = self._one("SELECT document FROM batches WHERE id = ? AND is_open", batch_id)
        if found is None:
            raise LeaseLost(f"batch {batch_id} has ended")
        return _batch_decoder.decode(found)

    def _one(self, query: str, *values: str) -> Any:
        with _errors(self.path):
            row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def _page(
        self, table: str, owner: str, page: Page, condition: str = "", values: Sequence[object] = ()
    ) -> list[bytes]:
        order, sign = ("DESC", "<") if page.newest_first else ("ASC", ">")
        # Only constants of this module are inserted.
        query = (
            f"SELECT document FROM {table} WHERE owner = ? {condition} AND (? IS NULL OR number {sign}"  # noqa: S608
            f" (SELECT number FROM {table} WHERE id = ? AND owner = ?)) ORDER BY number {order} LIMIT ?"
        )
        arguments = (owner, *values, page.after, page.after, owner, page.limit)
        with _errors(self.path):
            return [row for (row,) in self._db.execute(query, arguments)]


class QuotaExceeded(StoreError):  # noqa: N818 - a limit, not a failure
    """A tenant's files would exceed a limit."""


class TooManyBatches(StoreError):  # noqa: N818 - a limit, not a failure
    """A tenant's open batches would exceed their limit."""


def check_quota(used: int, added: int, limit: int) -> None:
    """Raise `QuotaExceeded` if bytes would be added to those of a tenant beyond its limit."""
    if used + added > limit:
        raise QuotaExceeded(
            f"your files have {used:,} bytes, and {added:,} more exceed the limit of {limit:,}: delete files"
        )


def is_on_network(path: Path) -> bool:
    """Return whether a path is on a file system that several machines may share."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents):
        if (kind := mounts.get(str(folder))) is not None:
            return kind.startswith(_NETWORK_SYSTEMS)
    return False


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: {error}") from error


def _put_file(db: sqlite3.Connection, record: FileRecord) -> None:
    db.execute(
        "INSERT INTO files (id, owner, purpose, bytes, expires_at, document) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET bytes = excluded.bytes, expires_at = excluded.expires_at,"
        " document = excluded.document",
        (
            record.id,
            record.owner,
            record.purpose,
            record.bytes,
            record.expires_at,
            msgspec.json.encode(record),
        ),
    )


def _put_batch(db: sqlite3.Connection, record: BatchRecord) -> None:
    db.execute(
        "UPDATE batches SET is_open = ?, document = ? WHERE id = ?",
        (record.is_open, msgspec.json.encode(record), record.id),
    )


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
        """Open a file; raise `FileNotFoundError` for one to read that does not exist."""
        with self.errors(file_id, FileNotFoundError if mode == "rb" else StoreError):
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
    def errors(self, file_id: str, unchanged: type[Exception] = StoreError) -> Iterator[None]:
        """Raise the errors of the file system as `StoreError`, except those of the class `unchanged`."""
        try:
            yield
        except (StoreError, unchanged):
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
