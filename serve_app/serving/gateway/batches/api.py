"""Endpoints of the Batch API, as OpenAI specifies them: `BATCH_ROUTES` at the end lists them.

An upload is a form whose file is written and checked while it arrives, so its length needs no memory.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import msgspec
from python_multipart.exceptions import FormParserError

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import ClientExchange, ClientGone, RequestRejected
from serve_app.serving.gateway.batches.runner import BatchRunner, InputChecker, call
from serve_app.serving.gateway.batches.store import (
    BatchError,
    BatchRecord,
    BatchStore,
    FileRecord,
    Page,
    QuotaExceeded,
    Storage,
    StoreError,
    TooManyBatches,
    check_quota,
    new_id,
    window_s,
)
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.request.body import FormParser, no_form
from serve_app.serving.gateway.request.endpoints import SCHEDULED
from serve_app.serving.gateway.request.reader import FORM_BYTES, RequestReader
from serve_app.serving.gateway.router import Handler, HttpRoute
from serve_app.serving.gateway.settings import GatewaySettings

_MAX_FIELDS, _MAX_FIELD_BYTES = 20, 4096
_FILE = "file"


class UploadForm:
    """The form of an upload.

    Args:
        content_type: of the request; has the boundary of the parts.

    Attributes:
        filename: name of the file; None until it arrives.

    Raises:
        RequestRejected: the body is not such a form.
    """

    def __init__(self, content_type: bytes) -> None:
        self.filename: str | None = None
        self._values: dict[str, bytearray] = {}
        self._name = ""
        self._data = bytearray()
        self._parser = FormParser(content_type, self, _MAX_FIELDS)

    @property
    def fields(self) -> dict[str, str]:
        """The values of the fields, except the file."""
        return {name: value.decode("utf-8", "replace") for name, value in self._values.items()}

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body, and return the bytes of the file in them."""
        self._parser.feed(data)
        found, self._data = bytes(self._data), bytearray()
        return found

    def finish(self) -> None:
        """Check that the form is complete and has a file."""
        self._parser.finish()
        if self.filename is None:
            raise no_form("the field file is missing")

    def begin(self, name: str, filename: str | None) -> None:
        """Begin a field."""
        self._name = name
        if name != _FILE:
            self._values[name] = bytearray()
            return
        if self.filename is not None:
            raise FormParserError("the field file occurs twice")
        self.filename = filename or _FILE

    def add(self, data: bytes, start: int, end: int) -> None:
        """Add a piece of the file or of a field."""
        if self._name == _FILE:
            self._data += data[start:end]
            return
        value = self._values[self._name]
        value += data[start:end]
        if len(value) > _MAX_FIELD_BYTES:
            raise FormParserError(f"the field {self._name[:40]} is longer than {_MAX_FIELD_BYTES} bytes")


FILES_PATH, BATCHES_PATH = "/v1/files", "/v1/batches"
_ID = "[A-Za-z0-9_-]{1,100}"
_FILES_PAGE, _BATCHES_PAGE = 10_000, 100
_DEFAULT_BATCHES_PAGE = 20
_PIECE_BYTES = 1024 * 1024
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_SHORTEST_EXPIRY_S, _LONGEST_EXPIRY_S = 3600, 30 * 24 * 3600
_MOST_SHOWN = 50
NO_BATCHES: Mapping[str, Any] = {"rows": (), "error": ""}
_RETRY_AFTER_S = 5.0
# Batches take minutes to hours.
_BATCH_RETRY_AFTER_S = 60.0


class OutputExpiry(msgspec.Struct):
    """When the output of a batch is deleted, in seconds after its creation."""

    seconds: int
    anchor: str = "created_at"


class BatchBody(msgspec.Struct):
    """Body of a request that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


_EXAMPLE = '{"input_file_id": "file-…", "endpoint": "/v1/chat/completions"}'


class BatchOwner(NamedTuple):
    """The caller of an endpoint: the tenant that owns files and batches, and the id of its key."""

    tenant: str
    key_id: str


class BatchApi:
    """Handlers of the endpoints.

    Args:
        folder: folder of the database and, unless the settings name another, of the files.
        gateway_id: unique among all gateways.
        serve: serves the requests of batches.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        folder: Path,
        reader: RequestReader,
        gateway_id: str,
        serve: Callable[[ClientExchange], None],
    ) -> None:
        self._settings = settings.batches
        self._reader = reader
        # Bytes of uploads in progress, by tenant.
        self._receiving: Counter[str] = Counter()
        self._storage = Storage(folder, settings.batches.files_uri)
        retention_s = settings.batches.retention_s
        serve_request = partial(call, serve)
        self._runner = BatchRunner(self._storage, serve_request, reader.caller_with, gateway_id, retention_s)
        self._runner.start()

    def __repr__(self) -> str:
        return f"<BatchApi {self._storage!r} {self._runner!r}>"

    async def stop(self) -> None:
        """Leave the batches to another gateway; the endpoints remain. Idempotent."""
        await self._runner.stop()

    def close(self) -> None:
        """Close the storage."""
        self._storage.close()

    async def overview(self) -> Mapping[str, Any]:
        """Return the last batches of all tenants, for the dashboard; `error` if the storage fails."""
        if await self._storage.is_new():
            return NO_BATCHES
        try:
            records = await self._storage(BatchStore.last_batches, _MOST_SHOWN)
        except StoreError as error:
            return {**NO_BATCHES, "error": str(error)}
        now = time()
        rows = [
            {"batch": each.shown(now), "tenant": each.owner, "rate_per_s": each.rate_per_s}
            for each in records
        ]
        return {"rows": rows, "error": ""}

    async def serve(self, handler: "BatchHandler", request: Request, *parameters: str) -> None:
        """Serve a request by a handler of `BATCH_ROUTES`.

        Raises:
            RequestRejected: it is invalid or not allowed, or the storage is not available.
        """
        caller = self._reader.authenticate(request)
        tenant = self._reader.owner(request, caller)
        owner = BatchOwner(tenant, "" if caller.key is None else caller.key.id)
        try:
            await handler(self, request, owner, *parameters)
        except StoreError as error:
            raise storage_rejection(error) from error

    # -- files

    async def upload_file(self, request: Request, owner: BatchOwner) -> None:
        """Store a form with `purpose` and `file`."""
        form = UploadForm(request.headers.get(b"content-type", b""))
        checker = InputChecker(self._settings.max_requests, self._reader.max_body_bytes)
        record = FileRecord(
            id=new_id("file-"), owner=owner.tenant, filename="", purpose="batch", created_at=int(time())
        )
        tenant, limit, received = owner.tenant, self._settings.max_stored_bytes, 0
        # Incomplete files are deleted after a day if this process ends now, or this request is cancelled.
        used = await self._storage(BatchStore.put_upload, record, limit, self._settings.max_files)
        try:
            writer = await self._storage.file_call(self._storage.contents.create, record.id)
        except Exception:
            await self._storage(BatchStore.delete_file, record.id)
            raise

        def write(data: bytes) -> None:
            checker.feed(data)
            writer.write(data)

        try:
            stated = int(request.headers.get(b"content-length", b"0"))
            check_quota(used + self._receiving[tenant], max(1, stated - FORM_BYTES), limit)
            async for data in self._reader.pieces(request, self._settings.max_file_bytes, _PIECE_BYTES):
                if contents := form.feed(data):
                    check_quota(used + self._receiving[tenant], len(contents), limit)
                    received += len(contents)
                    self._receiving[tenant] += len(contents)
                    await self._storage.file_call(write, contents)
            form.finish()
            checker.finish()
            record.expires_at = record.created_at + (
                _expiry_of_form(form.fields) or self._settings.retention_s
            )
            await self._storage.file_call(writer.close)
            record.bytes, record.filename, record.is_complete = writer.bytes, form.filename or "", True
            record.requests, record.first_lines = checker.requests, checker.first_lines
            await self._storage(BatchStore.put_upload, record, limit, self._settings.max_files)
        except BaseException:
            await asyncio.shield(self._abandon(record.id, writer.abandon))
            raise
        finally:
            # A difference of counters has no zeros, so tenants without uploads take no memory.
            self._receiving -= Counter({tenant: received})
        request.respond_json(record.shown())

    async def _abandon(self, file_id: str, abandon: Any) -> None:
        await self._storage.file_call(abandon)
        await self._storage(BatchStore.delete_file, file_id)

    async def list_files(self, request: Request, owner: BatchOwner) -> None:
        """Send a page of the tenant's files."""
        query = _query(request)
        page = _page(query, _FILES_PAGE, _FILES_PAGE)
        found = await self._storage(BatchStore.files, owner.tenant, query.get("purpose"), page)
        _send_list(request, [record.shown() for record in found], page)

    async def show_file(self, request: Request, owner: BatchOwner, file_id: str) -> None:
        """Send the description of a file."""
        request.respond_json((await self._file(file_id, owner)).shown())

    async def _file(self, file_id: str, owner: BatchOwner, param: str | None = None) -> FileRecord:
        found = await self._storage(BatchStore.file, file_id, owner.tenant)
        if found is None or (found.expires_at is not None and found.expires_at <= time()):
            raise _not_found("file", file_id, param)
        return found

    async def delete_file(self, request: Request, owner: BatchOwner, file_id: str) -> None:
        """Delete a file that no running batch reads."""
        record = await self._file(file_id, owner)
        batch_id = await self._storage(BatchStore.uses, record.id)
        if batch_id is not None:
            raise RequestRejected(
                Outcome.REJECTED_INVALID,
                f"file {record.id} is read by {batch_id}: wait for its end, or cancel it",
                code="file_in_use",
                status=409,
            )
        await self._storage.file_call(self._storage.contents.delete, record.id)
        await self._storage(BatchStore.delete_file, record.id)
        request.respond_json({"id": file_id, "object": "file", "deleted": True})

    async def send_contents(self, request: Request, owner: BatchOwner, file_id: str) -> None:
        """Send the contents of a file."""
        record = await self._file(file_id, owner)
        try:
            file = await self._storage.file_call(self._storage.contents.open, record.id)
        except FileNotFoundError:
            raise _not_found("file", record.id) from None
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % record.bytes),
        ]
        try:
            request.exchange.start_response(200, headers, request.id_lines)
            remaining = 0 if request.exchange.method == "HEAD" else record.bytes
            while remaining:
                piece = await self._storage.file_call(file.read, min(_PIECE_BYTES, remaining))
                if request.exchange.disconnected:
                    raise ClientGone("the client closed its connection")
                if not piece:
                    # Too few bytes for the stated length, so the client notices.
                    raise ClientGone(f"the contents of {record.id} are truncated")
                remaining -= len(piece)
                await request.write(piece)
            await request.write(b"", ends=True)
        finally:
            await self._storage.file_call(file.close)

    # -- batches

    async def create_batch(self, request: Request, owner: BatchOwner) -> None:
        """Create a batch of the requests in a file."""
        body = await self._reader.document(request, BatchBody, _EXAMPLE)
        record = BatchRecord(
            id=new_id("batch_"),
            owner=owner.tenant,
            key_id=owner.key_id,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=int(time()),
            expires_at=int(time()) + _window_of(body.completion_window),
            keep_output_s=_kept_s(body.output_expires_after, self._settings.retention_s),
            metadata=_checked_metadata(body.metadata),
        )
        if body.endpoint not in SCHEDULED:
            known = ", ".join(SCHEDULED)
            raise _invalid("endpoint", f"endpoint must be one of {known}; got {body.endpoint[:100]!r}")
        file = await self._file(body.input_file_id, owner, param="input_file_id")
        if file.purpose != "batch":
            raise _invalid("input_file_id", f"{file.id} has the purpose {file.purpose}: upload it as `batch`")
        record.total = file.requests
        record.errors = [
            BatchError("mismatched_url", f"url is {url}, but the endpoint is {body.endpoint}", "url", line)
            for url, line in file.first_lines.items()
            if url != body.endpoint
        ]
        if record.errors:
            record.enter("failed", time())
        await self._storage(BatchStore.add_batch, record, self._settings.max_open_batches)
        self._send_changed(request, record)

    async def list_batches(self, request: Request, owner: BatchOwner) -> None:
        """Send a page of the tenant's batches."""
        page = _page(_query(request), _DEFAULT_BATCHES_PAGE, _BATCHES_PAGE)
        now = time()
        found = await self._storage(BatchStore.batches, owner.tenant, page)
        _send_list(request, [record.shown(now) for record in found], page)

    async def show_batch(self, request: Request, owner: BatchOwner, batch_id: str) -> None:
        """Send the description of a batch."""
        record = await self._storage(BatchStore.batch, batch_id, owner.tenant)
        request.respond_json(_existing(record, batch_id).shown(time()))

    async def cancel_batch(self, request: Request, owner: BatchOwner, batch_id: str) -> None:
        """Cancel a batch."""
        record = await self._storage(BatchStore.cancel, batch_id, owner.tenant, time())
        self._send_changed(request, _existing(record, batch_id))

    def _send_changed(self, request: Request, record: BatchRecord) -> None:
        self._runner.wake()
        request.respond_json(record.shown(time()))


BatchHandler = Callable[..., Awaitable[None]]
_FILE_PATH, _BATCH = FILES_PATH + "/{file_id}", BATCHES_PATH + "/{batch_id}"
BATCH_ROUTES: tuple[tuple[str, str, str, BatchHandler], ...] = (
    ("POST", FILES_PATH, "upload a file of batch requests", BatchApi.upload_file),
    ("GET", FILES_PATH, "list of files", BatchApi.list_files),
    ("GET", _FILE_PATH, "one file", BatchApi.show_file),
    ("DELETE", _FILE_PATH, "delete a file", BatchApi.delete_file),
    ("GET", _FILE_PATH + "/content", "contents of a file", BatchApi.send_contents),
    ("POST", BATCHES_PATH, "create a batch", BatchApi.create_batch),
    ("GET", BATCHES_PATH, "list of batches", BatchApi.list_batches),
    ("GET", _BATCH, "one batch", BatchApi.show_batch),
    ("POST", _BATCH + "/cancel", "cancel a batch", BatchApi.cancel_batch),
)
"""Method, path, summary and handler of each endpoint."""


def batch_routes(serve: Callable[[BatchHandler], Handler]) -> Iterator[HttpRoute]:
    """Yield the routes of this API; `serve` adds what all handlers have in common."""
    for method, path, summary, handler in BATCH_ROUTES:
        yield HttpRoute(method, path, serve(handler), summary, _ID)


def storage_rejection(error: StoreError) -> RequestRejected:
    """Return the rejection of a request that the storage could not serve."""
    if isinstance(error, QuotaExceeded):
        return RequestRejected(Outcome.REJECTED_BODY_TOO_LARGE, str(error), code="storage_limit_exceeded")
    if isinstance(error, TooManyBatches):
        return RequestRejected(
            Outcome.REJECTED_RATE_LIMITED,
            str(error),
            code="batch_limit_exceeded",
            retry_after_s=_BATCH_RETRY_AFTER_S,
        )
    is_full = "full" in str(error) or "No space" in str(error)
    return RequestRejected(
        Outcome.FAILED,
        f"the storage of the Batch API is not available, and nothing was stored: {error}",
        code="storage_unavailable",
        status=507 if is_full else 503,
        retry_after_s=_RETRY_AFTER_S,
    )


def _send_list(request: Request, found: list[dict[str, Any]], page: Page) -> None:
    """Send a page of a list. `found` has one entry more than the page if a further page exists."""
    limit = page.limit - 1
    data = found[:limit]
    document = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }
    request.respond_json(document)


def _query(request: Request) -> dict[str, str]:
    parsed = request.query()
    return {name: values[-1] for name, values in parsed.items()}


def _page(query: Mapping[str, str], default: int, most: int) -> Page:
    written, order = query.get("limit", str(default)), query.get("order", "desc")
    # Python converts no number of thousands of digits.
    is_number = written.isascii() and written.isdigit() and len(written) < 10
    if not is_number or not 1 <= int(written) <= most:
        raise _invalid("limit", f"limit must be from 1 to {most:,}, got {written[:20]!r}")
    if order not in ("asc", "desc"):
        raise _invalid("order", f"order must be asc or desc, got {order[:20]!r}")
    return Page(int(written) + 1, query.get("after") or None, order == "desc")


def _window_of(written: str) -> int:
    seconds = window_s(written)
    if seconds is None:
        raise _invalid(
            "completion_window",
            f"completion_window must be 24h or shorter, such as 30m or 6h, got {written[:20]!r}",
        )
    return seconds


def _kept_s(expiry: OutputExpiry | None, default_s: int) -> int:
    if expiry is None:
        return default_s
    return _checked_expiry("output_expires_after", expiry.anchor, str(expiry.seconds))


def _expiry_of_form(fields: Mapping[str, str]) -> int | None:
    if (purpose := fields.get("purpose")) != "batch":
        got = "is missing" if purpose is None else f"is {purpose[:40]!r}"
        raise _invalid("purpose", f"purpose {got}: it must be batch, because files are used for batches only")
    if "expires_after[seconds]" not in fields:
        return None
    anchor = fields.get("expires_after[anchor]", "created_at")
    return _checked_expiry("expires_after", anchor, fields["expires_after[seconds]"])


def _checked_expiry(name: str, anchor: str, seconds: str) -> int:
    if anchor != "created_at":
        raise _invalid(name, f"{name}.anchor must be created_at, got {anchor[:40]!r}")
    given = int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else 0
    if not _SHORTEST_EXPIRY_S <= given <= _LONGEST_EXPIRY_S:
        limits = f"from {_SHORTEST_EXPIRY_S:,} to {_LONGEST_EXPIRY_S:,}"
        raise _invalid(name, f"{name}.seconds must be {limits}, got {seconds[:20]!r}")
    return given


def _checked_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    for key, value in (metadata or {}).items():
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            limits = f"{_MAX_KEY} characters, and values {_MAX_VALUE}"
            raise _invalid("metadata", f"keys of metadata have at most {limits}: shorten {key[:40]!r}")
    if metadata is not None and len(metadata) > _MAX_METADATA:
        raise _invalid("metadata", f"metadata has at most {_MAX_METADATA} entries, got {len(metadata)}")
    return metadata


def _invalid(param: str, message: str) -> RequestRejected:
    return RequestRejected(Outcome.REJECTED_INVALID, message, param=param)


def _existing(record: BatchRecord | None, batch_id: str) -> BatchRecord:
    if record is None:
        raise _not_found("batch", batch_id)
    return record


def _not_found(kind: str, given: str, param: str | None = None) -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_INVALID,
        f"there is no {kind} {given[:100]!r}: it was never created, was deleted, has expired, or belongs to "
        "another tenant",
        param=param or f"{kind}_id",
        code="not_found",
        status=404,
    )
