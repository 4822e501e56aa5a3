"""The keys of a file, which is read again whenever it changes.

A thread looks at the file every two seconds, so requests never wait for a file system, and a busy event loop
delays no revocation. A file that cannot be read keeps the keys of before, and is logged with the place of the
mistake: a slip of the pen must not lock everybody out.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from serve_app.api_keys.file import KeysFileError, read_keys
from serve_app.api_keys.record import KeyRecord
from serve_app.api_keys.secret import id_of, is_secret_of, parsed_hash
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.keys.caller import Caller, KeyPermissions

logger = logging.getLogger("ray.serve")

POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class _FileKey:
    """One key, ready to be compared; times are seconds since 1970."""

    salt: bytes
    digest: bytes
    caller: Caller
    expires_at: float | None
    revoked_at: float | None


class FileKeys:
    """Keys by id.

    Args:
        poll_s: between two looks at the file.

    Raises:
        KeysFileError: the file cannot be read now, at the start.
    """

    def __init__(self, path: Path, poll_s: float = POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._seen = self._mark()
        self._entries = _entries(read_keys(path))
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="keys-file", daemon=True).start()

    def __repr__(self) -> str:
        return f"<FileKeys {self._path} keys={len(self._entries)}>"

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def caller(self, secret: bytes) -> Caller | None:
        """Whose key it is; None when it is none of these.

        Raises:
            RequestRefused: the key has expired or was revoked. Only who has the whole secret is told.
        """
        key_id = id_of(secret)
        entry = None if key_id is None else self._entries.get(key_id)
        if entry is None or not is_secret_of(secret, entry.salt, entry.digest):
            return None
        if entry.expires_at is not None or entry.revoked_at is not None:
            _check_validity(entry, time.time())
        return entry.caller

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        mark = self._mark()
        if mark == self._seen:
            return
        # Noted first: what is written while the file is read is a change that the next look finds.
        self._seen = mark
        try:
            entries = _entries(read_keys(self._path))
        except KeysFileError as exc:
            logger.error(  # noqa: TRY400 - the message says all
                "event=keys_file_broken path=%s reason=%r action=%r",
                self._path,
                str(exc),
                f"the {len(self._entries)} keys read before stay in force",
            )
        else:
            self._entries = entries
            logger.info("event=keys_file_read path=%s keys=%d", self._path, len(entries))

    def _mark(self) -> tuple[int, int, int] | None:
        """What changes with the file; None while there is none."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - one call a look
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _entries(records: tuple[KeyRecord, ...]) -> dict[str, _FileKey]:
    return {record.id: _entry(record) for record in records}


def _entry(record: KeyRecord) -> _FileKey:
    salt, digest = parsed_hash(record.hash)
    permissions = KeyPermissions(
        tenant=record.tenant,
        terms=record.terms,
        default_class=max(record.highest_class, PriorityClass.DEFAULT, key=lambda each: each.rank),
        allowed_classes=record.classes,
        models=frozenset(record.models) if record.models else None,
        may_act_for_tenants=record.may_act_for_tenants,
    )
    caller = Caller(permissions, is_admin=record.admin)
    return _FileKey(salt, digest, caller, _seconds(record.expires_at), _seconds(record.revoked_at))


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _check_validity(entry: _FileKey, now: float) -> None:
    for word, since in (("was revoked", entry.revoked_at), ("has expired", entry.expires_at)):
        if since is not None and since <= now:
            day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(since))
            raise RequestRefused(
                Outcome.REJECTED_UNAUTHORISED, f"this API key {word} ({day}): ask for a new one"
            )
