"""Requests of batches enter the gateway as those of clients do, but from within its process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass

from serve_app.engines.engine import Message
from serve_app.serving.gateway.answer.client import ClientExchange
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.upstream.response import HeaderList

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

    async def receive(self) -> Message:
        """Return the body, and then wait forever, because a disconnect is only ever notified."""
        body, self._body = self._body, b""
        if body:
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(self, message: Message) -> None:
        """Collect a part of the answer."""
        if message["type"] == "http.response.start":
            self.start_response(message["status"], message["headers"])
        else:
            self.write_chunk(message.get("body", b""), ends=not message.get("more_body", False))

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
