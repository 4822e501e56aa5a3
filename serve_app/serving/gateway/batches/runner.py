"""The runner: serves the requests of all open batches, in one gateway at a time.

- `BatchRunner`: serves requests while it holds the lease.
- `InputChecker`, `InputReader`: input files, with one request per line.
- `call`: serves a request of a batch as those of clients, but from within the gateway's process.

`BatchRunner`. Each gateway tries to acquire the lease in the database; the holder extends it, and another one
takes over within seconds of its end. A gateway that stops releases it at once, and its requests are served
again by the next one: a request may be computed twice, but only its first result counts.

Requests enter the gateway in class `batch`, so the scheduler serves them on the capacity that other classes
leave. The runner only decides how many to submit. By Little's law, a share of `service / (wait + service)` of
those submitted is running, and the rest waits. A quarter more than those running fills the engines, and the
number grows by that factor as long as none waits.

At most `_MOST_BATCHES` batches run at a time: the oldest of each tenant first, then the second of each.

A batch that would miss its completion window at its present rate is submitted in class `default` instead, if
its key allows it.

`InputChecker`. A line is:

    {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": …}}

A file is checked while it is uploaded, so that a mistake is known before anything runs. Whatever depends on
the model, such as its name or the length of a prompt, is checked when the request runs, and is the error of
that request only.
"""

import asyncio
import contextlib
import contextvars
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from time import monotonic, time
from typing import IO, TypeVar

import msgspec

from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.gateway.answer.responses import ClientExchange, RequestRejected, encode
from serve_app.serving.gateway.answer.stream import RawUsage
from serve_app.serving.gateway.batches.store import (
    BatchError,
    BatchRecord,
    BatchStore,
    Contents,
    FileRecord,
    LeaseLost,
    Result,
    Status,
    Storage,
    StoreError,
    Tokens,
    new_id,
)
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.endpoints import SCHEDULED
from serve_app.serving.gateway.upstream import HeaderList

_MAX_ID_CHARACTERS = 512
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Lines that are read at once.
_BLOCK_BYTES = 256 * 1024


class _Body(msgspec.Struct, gc=False):
    model: str
    stream: bool | None = None


class _Request(msgspec.Struct, gc=False):
    custom_id: str
    url: str
    body: _Body
    method: str = "POST"


class BatchRequest(msgspec.Struct):
    """A request of a batch; `line` is its line in the input file, from 1."""

    custom_id: str
    url: str
    body: msgspec.Raw
    line: int = 0


class InputChecker:
    """Checker of an input file while it arrives.

    Args:
        max_requests: limit of requests in the file.
        max_line_bytes: limit of the length of each.

    Attributes:
        requests: number of requests so far.
        first_lines: line of the first request to each endpoint.
    """

    def __init__(self, max_requests: int, max_line_bytes: int) -> None:
        self.requests = 0
        self.first_lines: dict[str, int] = {}
        self._max_requests, self._max_line_bytes = max_requests, max_line_bytes
        self._decoder = msgspec.json.Decoder(_Request)
        self._ids: set[bytes] = set()
        self._rest = b""
        self._line = 0

    def feed(self, data: bytes) -> None:
        """Check the next bytes.

        Raises:
            RequestRejected: a line is not a request; the message has its number.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._check(line)
        if len(self._rest) > self._max_line_bytes:
            self._line += 1
            raise self._too_long()

    def finish(self) -> None:
        """Check the last line.

        Raises:
            RequestRejected: it is not a request, or the file has no request.
        """
        self._check(self._rest)
        self._rest = b""
        if not self.requests:
            raise invalid_file("empty_file", "the file has no request: write one per line")

    def _check(self, line: bytes) -> None:
        self._line += 1
        if self._line == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            return
        if len(line) > self._max_line_bytes:
            raise self._too_long()
        request = self._decoded(line)
        self.requests += 1
        if self.requests > self._max_requests:
            raise self._error(
                "too_many_requests",
                f"a batch has at most {self._max_requests:,} requests: split the file",
            )
        if request.method != "POST":
            raise self._error("invalid_method", f"method must be POST, got {request.method[:20]!r}")
        if request.url not in SCHEDULED:
            known = ", ".join(SCHEDULED)
            raise self._error("invalid_url", f"url must be one of {known}; got {request.url[:100]!r}")
        if request.body.stream:
            raise self._error("invalid_request", "body.stream must be false or omitted in a batch")
        if not 0 < len(request.custom_id) <= _MAX_ID_CHARACTERS:
            raise self._error(
                "invalid_custom_id", f"custom_id must have 1 to {_MAX_ID_CHARACTERS} characters"
            )
        # A digest takes less memory than a long id.
        digest = blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            raise self._error("duplicate_custom_id", f"custom_id {request.custom_id[:100]!r} occurs twice")
        self._ids.add(digest)
        self.first_lines.setdefault(request.url, self._line)

    def _decoded(self, line: bytes) -> _Request:
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise self._error("invalid_request", str(error)) from error
        except (ValueError, RecursionError) as error:
            raise self._error("invalid_json_line", f"not JSON: {error}") from error

    def _too_long(self) -> RequestRejected:
        return self._error("line_too_long", f"longer than {self._max_line_bytes:,} bytes")

    def _error(self, code: str, problem: str) -> RequestRejected:
        return invalid_file(code, f"line {self._line}: {problem}")


class InputReader:
    """Reader of the requests of a checked file; blocks."""

    def __init__(self, contents: Contents, file_id: str) -> None:
        self._contents, self._file_id = contents, file_id
        self._file: IO[bytes] | None = None
        # Lines of which the requests were returned.
        self._returned = 0
        self._decoder = msgspec.json.Decoder(BatchRequest)

    def next(self) -> list[BatchRequest]:
        """Return the next requests in the order of the file; empty at its end.

        After an error the file is opened again, and the next call returns the same requests.

        Raises:
            StoreError: the file cannot be read.
            FileNotFoundError: there is no such file.
        """
        try:
            with self._contents.errors(self._file_id, FileNotFoundError):
                return self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _next(self) -> list[BatchRequest]:
        if self._file is None:
            self._file = self._contents.open(self._file_id)
            for _ in range(self._returned):
                self._file.readline()
        requests: list[BatchRequest] = []
        number = self._returned
        while not requests and (lines := self._file.readlines(_BLOCK_BYTES)):
            for line in lines:
                number += 1
                written = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if written.strip():
                    request = self._decoder.decode(written)
                    request.line = number
                    requests.append(request)
        self._returned = number
        return requests


def invalid_file(code: str, message: str) -> RequestRejected:
    """Return the rejection of an input file."""
    return RequestRejected(Outcome.REJECTED_INVALID, message, code=code, param="file")


logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request, with header names in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def header(self, name: bytes) -> float | None:
        """Return a header that is a number; None if it is missing or is none."""
        try:
            return float(self.headers[name])
        except (KeyError, ValueError):
            return None


ServeRequest = Callable[[str, bytes, Mapping[bytes, bytes], Caller], Awaitable[Answer]]
"""Serves a request: path, body, headers, caller."""


class CollectingExchange:
    """A `ClientExchange` of a request that has no connection; it collects the answer.

    Attributes:
        pieces: pieces of the answer's body.
        ended: set at the end of the answer.
    """

    client: tuple[str, int] | None = None
    query = b""

    def __init__(
        self,
        path: str,
        body: bytes | None,
        headers: Iterable[tuple[bytes, bytes]] = (),
        caller: object | None = None,
    ) -> None:
        self.method = "GET" if body is None else "POST"
        self.path = path
        self.headers: HeaderList = list(headers)
        self.caller = caller
        self.more_body = self.disconnected = self.response_complete = False
        self.status = 0
        self.added_headers: HeaderList = []
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.pieces: list[bytes] = []
        self.ended = asyncio.Event()
        self._body = body or b""
        self._answer_headers: dict[bytes, bytes] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def is_choked(self) -> bool:
        """False: there is always room for more."""
        return False

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Serve the request in a task."""
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=http_error path=%r", self.path, exc_info=error)
            self.fail()
        elif self.on_disconnect is None:
            self.fail()

    def fail(self) -> None:
        """End an incomplete answer."""
        if not self.response_complete:
            self.status, self.response_complete = 500, True
            self.ended.set()

    def disconnect(self) -> None:
        """Withdraw the request."""
        if self.response_complete or self.disconnected:
            return
        self.disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()

    def take_body(self) -> bytes:
        """Return the body."""
        return self._body

    async def receive(self) -> bytes | None:
        """Return the body."""
        return self._body

    async def drain(self) -> None:
        """Return at once: there is always room for more."""

    def start_response(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes = b"") -> None:
        """Record the head of the answer."""
        self.status, self._answer_headers = status, dict(headers)
        for line in lines.splitlines():
            name, _, value = line.partition(b": ")
            self._answer_headers[name] = value

    def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
        """Collect a piece; there is always room for more."""
        self.pieces.append(piece)
        if ends:
            self.response_complete = True
            self.on_disconnect = self.on_writable = None
            self.ended.set()
        return True

    def answer(self) -> Answer:
        """Return the answer so far."""
        return Answer(self.status, self._answer_headers, b"".join(self.pieces))


async def call(
    app: Callable[[ClientExchange], None],
    path: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    caller: Caller,
) -> Answer:
    """Serve a POST request. Cancelling the task cancels the request, as a client that disconnects does."""
    json = (b"content-type", b"application/json")
    exchange = CollectingExchange(path, body, [json, *headers.items()], caller)
    app(exchange)
    try:
        await exchange.ended.wait()
    finally:
        exchange.disconnect()
    return exchange.answer()


T = TypeVar("T")

_LEASE_S = 6.0
_TURN_S = 1.5
_SWEEP_S = 60.0
# Uploads that were not completed within this time never will be.
_ABANDONED_S = 24 * 3600.0

# Requests submitted at first and at least, and most of all batches together: each holds its body in memory.
_FEWEST, _MOST = 4, 1024
# Batches that run at a time.
_MOST_BATCHES = 64
_SPARE = 1.25
# Weight of a request in the means of waits and services.
_WEIGHT = 1 / 16
# Attempts of a request whose engine fails. Rejections for lack of capacity do not count.
_ATTEMPTS = 3
_BUSY, _FAILED = (429, 503), (500, 502, 504)
_LONGEST_PAUSE_S = 60.0
# Results are stored together, because each transaction waits for the disk.
_FLUSH_S = 0.05
# While they cannot be stored, for example because the disk is full, they are held in memory.
_MOST_UNSTORED = 256
# A batch is late if it needs more than this share of the remaining time.
_LATE_SHARE = 0.8
# Interval and time constant of the measured rate.
_RATE_INTERVAL_S, _RATE_S = 2.0, 30.0
_ENDED_TOGETHER = 500
# Time to end the runs and to release the lease, which a file system may not answer.
_STOP_TIMEOUT_S = 3.0

_EXPIRED = ("batch_expired", "This request was not executed before the completion window ended.")
_LOST = ("internal_error", "This request was not executed, because of an internal error; see the log.")
_CANCELLED = ("batch_cancelled", "This request was not executed, because the batch was cancelled.")


class BatchRunner:
    """Serves the requests of open batches while it holds the lease.

    Args:
        serve: serves one request.
        caller_of: returns the caller with an API key; raises `RequestRejected` if the key is not valid.
        holder: name of this gateway, unique among all.
        retention_s: time after the window of a batch until it is deleted.
    """

    def __init__(
        self,
        storage: Storage,
        serve: ServeRequest,
        caller_of: Callable[[str], Caller],
        holder: str,
        retention_s: float,
    ) -> None:
        self._storage = storage
        self._serve = serve
        self._caller_of = caller_of
        self._holder = holder
        self._retention_s = retention_s
        self._runs: dict[str, tuple[_BatchRun, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._token: int | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._swept_at = 0.0
        self._failure = ""

    def __repr__(self) -> str:
        return f"<BatchRunner token={self._token} batches={len(self._runs)}>"

    @property
    def is_leading(self) -> bool:
        """Whether this gateway runs the batches."""
        return self._token is not None

    def start(self) -> None:
        """Start to acquire the lease, and to run batches."""
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name="batches", context=contextvars.Context()
        )

    def wake(self) -> None:
        """Look for new or cancelled batches now."""
        self._wake.set()

    async def stop(self) -> None:
        """Cancel the requests in progress, and release the lease. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        if self._sweeping is not None:
            self._sweeping.cancel()
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.wait({task})
                await self._cancel_runs()
                if self._token is not None:
                    self._token = None
                    await self._storage(BatchStore.release, self._holder)

    async def _run(self) -> None:
        while True:
            try:
                if not await self._storage.is_new():
                    await self._turn()
                self._report("")
            except StoreError as error:
                self._report(str(error))
            except Exception:
                logger.exception("event=batches_error")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _TURN_S)

    def _report(self, failure: str) -> None:
        if failure == self._failure:
            return
        self._failure = failure
        if failure:
            logger.error("event=batches_stalled reason=%r action='trying again'", failure)
        else:
            logger.info("event=batches_continue")

    async def _turn(self) -> None:
        """Extend the lease; start and end runs."""
        token = await self._storage(BatchStore.acquire, self._holder, time(), _LEASE_S)
        if token != self._token:
            await self._cancel_runs()
            self._token = token
        if token is None:
            return
        for batch_id, (_, task) in tuple(self._runs.items()):
            if task.done():
                del self._runs[batch_id]
        records = await self._storage(BatchStore.runnable, time(), _MOST_BATCHES)
        for record in records:
            if record.id not in self._runs:
                run = _BatchRun(record, token, self._storage, self._serve, self._caller_of)
                task = asyncio.get_running_loop().create_task(run.run(), name=record.id)
                self._runs[record.id] = run, task
            self._runs[record.id][0].observe(record, time(), _MOST // len(records))
        if monotonic() - self._swept_at > _SWEEP_S and (self._sweeping is None or self._sweeping.done()):
            self._swept_at = monotonic()
            # In a task, because a slow bucket must not delay the next extension of the lease.
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        """Delete expired files that no open batch reads, and batches that ended long ago."""
        now = time()
        try:
            for file_id in await self._storage(BatchStore.expired_files, now, now - _ABANDONED_S):
                await self._storage.file_call(self._storage.contents.delete, file_id)
                await self._storage(BatchStore.delete_file, file_id)
            await self._storage(BatchStore.delete_ended, now - self._retention_s)
        except StoreError as error:
            logger.warning("event=batch_sweep_failed reason=%r", str(error))

    async def _cancel_runs(self) -> None:
        tasks = [task for _, task in self._runs.values()]
        self._runs.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass(slots=True)
class _Pace:
    """Determines how many requests of a batch are submitted at a time."""

    most: int = _MOST
    wait_s: float = 0.0
    service_s: float = 0.0
    window: float = _FEWEST

    def on_end(self, wait_s: float, service_s: float, submitted: int) -> None:
        """Update the window after a request.

        Args:
            wait_s, service_s: its times in the queue and on an engine.
            submitted: number of submitted requests, this one included.
        """
        weight = _WEIGHT if self.service_s else 1.0
        self.wait_s += weight * (wait_s - self.wait_s)
        self.service_s += weight * (service_s - self.service_s)
        running = submitted * self.service_s / max(self.wait_s + self.service_s, 1e-9)
        self.window = min(self.most, _SPARE * running + _FEWEST)


class _BatchRun:
    """Serves the requests of one batch. Single use."""

    def __init__(
        self,
        record: BatchRecord,
        token: int,
        storage: Storage,
        serve: ServeRequest,
        caller_of: Callable[[str], Caller],
    ) -> None:
        self._record = record
        self._token = token
        self._storage = storage
        self._serve = serve
        self._caller_of = caller_of
        self._pace = _Pace()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        # Code and message of requests that are no longer to be served.
        self._end: tuple[str, str] | None = None
        self._results: list[Result] = []
        self._has_results = asyncio.Event()
        self._rate_at, self._rate_done = monotonic(), record.completed + record.failed

    def observe(self, record: BatchRecord, now: float, most: int) -> None:
        """Note the stored state, the time, and how many requests may be submitted."""
        self._pace.most = max(_FEWEST, most)
        if record.status == "cancelling":
            self._end = _CANCELLED
        elif record.status == "in_progress" and now >= record.expires_at:
            self._end = _EXPIRED
        if self._end is not None:
            self._changed.set()

    async def run(self) -> None:
        """Serve all requests, and write the files of the batch."""
        try:
            await self._change(_begin)
            if self._record.status != "finalizing":
                await self._serve_or_fail()
            await self._write_files()
        except LeaseLost:
            logger.info("event=batch_left batch=%s", self._record.id)
        except Exception:
            # The runner starts the batch again, and no result is lost.
            logger.exception("event=batch_error batch=%s", self._record.id)

    async def _serve_or_fail(self) -> None:
        """Serve all requests; note why that is not possible. The results until then remain."""
        try:
            await self._serve_requests()
        except FileNotFoundError as error:
            failure = BatchError("input_file_missing", f"the contents of the input file are missing: {error}")
            await self._change(partial(_note_failure, failure))

    # -- requests

    async def _serve_requests(self) -> None:
        storing = asyncio.create_task(self._store_results())
        storing.add_done_callback(lambda _: self._changed.set())
        try:
            async with contextlib.aclosing(self._requests()) as requests:
                async for request in requests:
                    await self._until(self._has_room, storing)
                    if self._end is not None:
                        break
                    task = asyncio.create_task(self._serve_request(request))
                    self._tasks.add(task)
                    task.add_done_callback(self._on_task)
            await self._until(lambda: not self._tasks, storing)
            await self._cancel_tasks()
            await self._until(lambda: not self._results, storing, ends=False)
        finally:
            storing.cancel()
            await self._cancel_tasks()
            await asyncio.gather(storing, return_exceptions=True)
        if self._record.remaining:
            await self._end_rest(self._end or _LOST)

    def _has_room(self) -> bool:
        return len(self._tasks) < self._pace.window and len(self._results) < _MOST_UNSTORED

    async def _until(
        self, is_true: Callable[[], bool], storing: "asyncio.Task[None]", *, ends: bool = True
    ) -> None:
        """Wait for a condition, or for the end of the batch if `ends`."""
        while not (is_true() or (ends and self._end is not None)):
            if storing.done():
                storing.result()
            self._changed.clear()
            await self._changed.wait()

    async def _cancel_tasks(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _on_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _requests(self) -> AsyncGenerator[BatchRequest, None]:
        """Yield the requests without a result, in the order of the input."""
        reader = InputReader(self._storage.contents, self._record.input_file_id)
        try:
            while requests := await self._persist(partial(self._storage.file_call, reader.next)):
                done = await self._persist(
                    partial(
                        self._storage,
                        BatchStore.lines_with_result,
                        self._record.id,
                        requests[0].line,
                        requests[-1].line,
                    )
                )
                for request in requests:
                    if request.line not in done:
                        yield request
        finally:
            reader.close()

    async def _serve_request(self, request: BatchRequest) -> None:
        began, failures = monotonic(), 0
        while True:
            attempt_at = monotonic()
            answer = await self._send(request)
            failures += answer.status in _FAILED and not _is_busy(answer)
            pause_s = _pause_s(answer, failures)
            if pause_s is None:
                break
            await asyncio.sleep(pause_s * (1 + random.random() / 4))  # noqa: S311 - spreads attempts
        ended = monotonic()
        service_s = max(0.0, ended - attempt_at - (answer.header(b"x-queue-wait-ms") or 0.0) / 1000)
        self._pace.on_end(ended - began - service_s, service_s, len(self._tasks))
        self._results.append(_result(self._record, request, answer))
        self._has_results.set()

    async def _send(self, request: BatchRequest) -> Answer:
        record = self._record
        try:
            caller = self._caller_of(record.key_id)
        except RequestRejected as rejection:
            return Answer(rejection.status, {}, rejection.body())
        left_s = max(1.0, record.expires_at - time())
        priority = PriorityClass.BATCH
        if self._is_late(left_s) and (caller.key is None or PriorityClass.DEFAULT in caller.key.classes):
            priority = PriorityClass.DEFAULT
        headers = {
            b"x-tenant": record.owner.encode(),
            b"x-priority": priority.value.encode(),
            b"x-queue-timeout-s": b"%.0f" % left_s,
        }
        try:
            return await self._serve(request.url, bytes(request.body), headers, caller)
        except Exception as error:
            logger.exception("event=batch_request_error batch=%s line=%d", record.id, request.line)
            failure = RequestRejected(Outcome.FAILED, f"internal error of the gateway: {error!r}", status=500)
            return Answer(failure.status, {}, failure.body())

    def _is_late(self, left_s: float) -> bool:
        record = self._record
        return record.rate_per_s > 0 and record.remaining / record.rate_per_s > _LATE_SHARE * left_s

    async def _store_results(self) -> None:
        """Store results as they come, and the rate at which they do."""
        while True:
            await self._has_results.wait()
            await asyncio.sleep(_FLUSH_S)
            self._has_results.clear()
            count = len(self._results)
            results = tuple(self._results[:count])
            await self._add(results)
            del self._results[:count]
            self._changed.set()
            if monotonic() - self._rate_at > _RATE_INTERVAL_S:
                await self._change(self._measure_rate)

    def _measure_rate(self, record: BatchRecord) -> None:
        now, done = monotonic(), record.completed + record.failed
        passed_s = now - self._rate_at
        weight = 1.0 if not record.rate_per_s else min(1.0, passed_s / _RATE_S)
        record.rate_per_s += weight * ((done - self._rate_done) / passed_s - record.rate_per_s)
        self._rate_at, self._rate_done = now, done

    async def _end_rest(self, end: tuple[str, str]) -> None:
        """Store an error for each request that was not served."""
        results: list[Result] = []
        async for request in self._requests():
            if end == _EXPIRED and not self._record.is_expired:
                await self._change(_expire)
            results.append(_unserved(self._record, request, *end))
            if len(results) >= _ENDED_TOGETHER:
                await self._add(tuple(results))
                results.clear()
        await self._add(tuple(results))

    async def _add(self, results: Sequence[Result]) -> None:
        storage, token, batch_id = self._storage, self._token, self._record.id
        add = partial(storage, BatchStore.add_results, token, batch_id, results)
        self._record = await self._persist(add)

    # -- files

    async def _write_files(self) -> None:
        # With ids of this attempt, because a runner that was suspended may still write or delete its own.
        record = await self._change(_finalize)
        files = [
            await self._persist(partial(self._write_file, file_id, errors=errors))
            for file_id, errors in ((record.output_file_id, False), (record.error_file_id, True))
            if file_id
        ]
        storage, token = self._storage, self._token
        await self._persist(partial(storage, BatchStore.complete, token, record.id, files, _complete))

    async def _write_file(self, file_id: str, *, errors: bool) -> FileRecord:
        record = self._record
        file = FileRecord(
            id=file_id,
            owner=record.owner,
            filename=f"{record.id}_{'error' if errors else 'output'}.jsonl",
            purpose="batch_output",
            created_at=int(time()),
            expires_at=int(time()) + record.keep_output_s,
        )
        # Until it is complete, it is deleted after a day if this process ends now.
        await self._storage(BatchStore.put_file, file)
        writer = await self._storage.file_call(self._storage.contents.create, file_id)
        try:
            line = 0
            while rows := await self._storage(BatchStore.outputs, record.id, line, errors=errors):
                line = rows[-1][0]
                await self._storage.file_call(writer.write, b"".join(output + b"\n" for _, output in rows))
            await self._storage.file_call(writer.close)
        except BaseException:
            await asyncio.shield(self._storage.file_call(writer.abandon))
            raise
        file.bytes, file.is_complete = writer.bytes, True
        return file

    # -- storage

    async def _change(self, change: Callable[[BatchRecord], object]) -> BatchRecord:
        storage, token, batch_id = self._storage, self._token, self._record.id
        self._record = await self._persist(partial(storage, BatchStore.change, token, batch_id, change))
        return self._record

    async def _persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat work on the storage until it succeeds, for example until a full disk has room again.

        Raises:
            LeaseLost: another gateway runs the batches now.
        """
        pause_s = 0.5
        while True:
            try:
                return await work()
            except LeaseLost:
                raise
            except StoreError as error:
                logger.warning("event=batch_waits batch=%s reason=%r", self._record.id, str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)


def _begin(record: BatchRecord) -> None:
    if record.status == "validating":
        record.enter("in_progress", time())


def _note_failure(error: BatchError, record: BatchRecord) -> None:
    record.errors = [error]


def _expire(record: BatchRecord) -> None:
    record.is_expired = True


def _finalize(record: BatchRecord) -> None:
    if record.status != "finalizing":
        record.enter("finalizing", time())
    record.output_file_id = new_id("file-") if record.completed else ""
    record.error_file_id = new_id("file-") if record.failed else ""


def _complete(record: BatchRecord) -> None:
    ends: tuple[tuple[object, Status], ...] = (
        (record.errors, "failed"),
        (record.is_expired, "expired"),
        ("cancelling" in record.reached, "cancelled"),
    )
    record.enter(next((status for applies, status in ends if applies), "completed"), time())


def _pause_s(answer: Answer, failures: int) -> float | None:
    """Return the time until a request should be sent again; None if its answer is final.

    Args:
        failures: how often its engine has failed, this answer included.
    """
    if _is_busy(answer):
        stated_ms = answer.header(b"retry-after-ms")
        stated_s = (answer.header(b"retry-after") or 1.0) if stated_ms is None else stated_ms / 1000
        return min(max(stated_s, 0.1), _LONGEST_PAUSE_S)
    if answer.status in _FAILED and failures < _ATTEMPTS:
        return float(failures)
    return None


def _is_busy(answer: Answer) -> bool:
    """Return whether a request was rejected for lack of capacity."""
    return answer.status in _BUSY or (answer.status == 504 and b'"queue_timeout"' in answer.body)


class _AnswerUsage(msgspec.Struct):
    usage: RawUsage | None = None


_usage_decoder = msgspec.json.Decoder(_AnswerUsage)


def _result(record: BatchRecord, request: BatchRequest, answer: Answer) -> Result:
    body: object = msgspec.Raw(answer.body)
    tokens = Tokens()
    try:
        usage = _usage_decoder.decode(answer.body).usage
    except msgspec.ValidationError:
        # An answer without OpenAI's usage.
        usage = None
    except (ValueError, RecursionError):
        body, usage = answer.body.decode("utf-8", "replace"), None
    if isinstance(body, msgspec.Raw) and b"\n" in answer.body:
        body = msgspec.json.decode(answer.body)
    counted = usage.counted() if usage is not None else None
    if counted is not None:
        tokens = Tokens(counted.prompt_tokens, counted.cached_tokens or 0, counted.output_tokens)
    request_id = answer.headers.get(b"x-request-id", b"").decode("latin-1")
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    return _line_of(record, request, tokens, is_error=answer.status >= 400, response=response, error=None)


def _unserved(record: BatchRecord, request: BatchRequest, code: str, message: str) -> Result:
    error = {"code": code, "message": message}
    return _line_of(record, request, Tokens(), is_error=True, response=None, error=error)


def _line_of(
    record: BatchRecord,
    request: BatchRequest,
    tokens: Tokens,
    *,
    is_error: bool,
    response: dict[str, object] | None,
    error: dict[str, str] | None,
) -> Result:
    request_id = f"batch_req_{record.id.removeprefix('batch_')}_{request.line}"
    entry = {"id": request_id, "custom_id": request.custom_id, "response": response, "error": error}
    return Result(request.line, is_error, encode(entry), tokens)
