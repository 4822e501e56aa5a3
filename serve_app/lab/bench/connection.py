"""HTTP/1.1 client with low overhead: a protocol object per connection, on top of httptools' parser.

A request on an idle connection starts without a task or a future. A connection that was idle for longer than
`IDLE_LIMIT_S` is not reused: servers close idle connections after a few seconds, and a request on a closing
connection would fail without a fault of the endpoint.

It differs from the gateway's upstream client on purpose. That one applies backpressure to the engine if a
client reads slowly. This one never waits, reads the clock at every arrival of bytes, and supports TLS. Times
are from `time.monotonic`, because the clock of a uvloop event loop advances in whole milliseconds.

The outcome of a request is parsed from the bytes of its response as they arrive. Each event is decoded until
the first generated token. Afterwards only the last bytes are parsed, which contain the usage, an error and
the end marker. A response counts as completed only with a complete HTTP message, status 200, `[DONE]` for a
stream, and no error in the body.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from serve_app.errors import HTTP_STATUS, Outcome, ServeAppError

# Enough for the last events (usage, error, end marker). An engine's error message may be long.
_TAIL_BYTES = 8192
# Maximum bytes buffered of an error or a response that is not a stream.
_WHOLE_BYTES = 16 * 1024 * 1024

_OUTCOME_OF_CODE = {
    "context_length_exceeded": Outcome.REJECTED_TOO_LONG,
    "queue_full": Outcome.REJECTED_QUEUE_FULL,
    "deadline_unmeetable": Outcome.REJECTED_DEADLINE_UNMEETABLE,
    "rate_limit_exceeded": Outcome.REJECTED_RATE_LIMITED,
    "no_replica": Outcome.REJECTED_NO_REPLICA,
    "queue_timeout": Outcome.EXPIRED,
    "model_not_found": Outcome.REJECTED_UNKNOWN_MODEL,
}
# If several outcomes have the same status, the first one applies.
_OUTCOME_OF_STATUS = {status: outcome for outcome, status in reversed(HTTP_STATUS.items())}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _UsageCounts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _UsageCounts | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


class ResponseParser:
    """A response while it arrives.

    Args:
        stream: whether the request is for a stream.
        on_end: called once, at the end of the response, completed or not.

    Attributes:
        status: HTTP status, 0 before it is known.
        headers: by lower-case name.
        first_token_at: arrival of the first generated token.
        finished_at: end of the response.
        prompt_tokens, output_tokens: the engine's counts; None if not reported.
        outcome: None until the end.
        detail: the reason if it did not complete.
    """

    __slots__ = (
        "_bytes",
        "_on_end",
        "_stream",
        "detail",
        "finished_at",
        "first_token_at",
        "headers",
        "outcome",
        "output_tokens",
        "prompt_tokens",
        "status",
    )

    def __init__(self, *, stream: bool, on_end: Callable[["ResponseParser"], object]) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.first_token_at: float | None = None
        self.finished_at = 0.0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.outcome: Outcome | None = None
        self.detail = ""
        self._stream = stream
        self._on_end = on_end
        self._bytes = b""

    def header(self, name: bytes) -> str:
        """Return a response header, or an empty string."""
        return self.headers.get(name, b"").decode("latin-1")

    def on_body(self, piece: bytes, now: float) -> None:
        """Process bytes of the body."""
        if not self._stream or self.status != 200:
            self._bytes = (self._bytes + piece)[:_WHOLE_BYTES]
        elif self.first_token_at is not None:
            self._bytes = (self._bytes + piece)[-_TAIL_BYTES:]
        else:
            self._bytes += piece
            if self._has_token():
                self.first_token_at = now
                self._bytes = self._bytes[-_TAIL_BYTES:]

    def on_complete(self, now: float) -> None:
        """Process the end of the HTTP message."""
        if self.status != 200:
            self._rejected(now)
        elif self._stream:
            self._stream_ended(now)
        else:
            self._document_ended(now)

    def fail(self, detail: str, now: float, outcome: Outcome = Outcome.FAILED) -> None:
        """End the response as not completed. Only the first end counts."""
        self._end(outcome, now, detail)

    def _has_token(self) -> bool:
        """Return whether a complete event has generated text.

        Parsed events are dropped, except for the last one, which may be the end marker, and an error.
        """
        *events, rest = self._bytes.replace(b"\r\n", b"\n").split(b"\n\n")
        for position, raw in enumerate(events):
            event = _event(raw)
            self._note_usage(event)
            if event.error is not None or _carries_token(event):
                self._bytes = b"\n\n".join((*events[position:], rest))
                return event.error is None
        self._bytes = b"\n\n".join((*events[-1:], rest))
        return False

    def _rejected(self, now: float) -> None:
        error = _event(b"data: " + self._bytes).error
        code = str(error.code or error.type or "") if error is not None else ""
        outcome = _OUTCOME_OF_CODE.get(code) or _OUTCOME_OF_STATUS.get(self.status, Outcome.FAILED)
        message = (error.message if error is not None else None) or self._bytes[:200].decode(
            "utf-8", "replace"
        )
        self._end(outcome, now, f"HTTP {self.status} {code}: {message}")

    def _stream_ended(self, now: float) -> None:
        *events, rest = self._bytes.replace(b"\r\n", b"\n").split(b"\n\n")
        for raw in events:
            event = _event(raw)
            self._note_usage(event)
            if event.error is not None:
                self._end(Outcome.FAILED, now, f"error in the stream: {event.error.message}")
                return
        if not events or events[-1].strip() != b"data: [DONE]":
            self._end(Outcome.FAILED, now, f"the stream ended without [DONE] after {rest[-80:]!r}")
            return
        self._end(Outcome.COMPLETED, now)

    def _document_ended(self, now: float) -> None:
        event = _event(b"data: " + self._bytes)
        self._note_usage(event)
        if event.error is not None or not event.choices:
            self._end(Outcome.FAILED, now, f"status 200 without a valid response: {self._bytes[:200]!r}")
            return
        self._end(Outcome.COMPLETED, now)

    def _note_usage(self, event: _Event) -> None:
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.output_tokens = event.usage.completion_tokens

    def _end(self, outcome: Outcome, now: float, detail: str = "") -> None:
        if self.outcome is None:
            self.outcome, self.finished_at, self.detail = outcome, now, detail[:500]
            self._bytes = b""
            self._on_end(self)


def _event(raw: bytes) -> _Event:
    """Decode a server-sent event; return an empty one if it is not a JSON object of the expected form."""
    data = raw.strip().removeprefix(b"data:").strip()
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _NOTHING


_NOTHING = _Event()


def _carries_token(event: _Event) -> bool:
    for choice in event.choices:
        delta: Any = choice.delta
        if choice.text or (
            delta is not None
            and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
        ):
            return True
    return False


IDLE_LIMIT_S = 2.0
"""Below the keep-alive timeouts of common servers (uvicorn 5 s, nginx 75 s)."""
CONNECT_TIMEOUT_S = 10.0


class BenchError(ServeAppError):
    """A benchmark cannot run; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Target:
    """Address of the endpoint."""

    host: str
    port: int
    tls: bool
    path_prefix: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Parse `http://host:port[/prefix]`, with or without a trailing `/v1`.

        Raises:
            BenchError: the URL has another form.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise BenchError(f"cannot read URL {url!r}: {exc}") from exc
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise BenchError(f"the URL must have the form http://127.0.0.1:8000, got {url!r}")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The URL before `/v1`."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path_prefix}"


class Connection(asyncio.Protocol):
    """A connection for one request at a time, which passes the received bytes to its `ResponseParser`.

    Attributes:
        is_open: whether it is open as far as this side knows.
        idle_since: end of its last response.
    """

    __slots__ = (
        *("_response", "_now", "_on_idle", "_parser", "_transport"),
        *("idle_since", "is_open"),
    )

    def __init__(self, on_idle: Callable[["Connection"], object]) -> None:
        self.is_open = False
        self.idle_since = 0.0
        self._on_idle = on_idle
        self._response: ResponseParser | None = None
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def start(self, request: bytes, response: ResponseParser) -> None:
        """Send a request. `response` receives all bytes from now on, and ends exactly once."""
        assert self._transport is not None
        assert self._response is None
        self._response = response
        self._transport.write(request)

    def close(self) -> None:
        """Abort the connection immediately."""
        self.is_open = False
        self._response = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport: the connection is ready for a request."""
        # A cast, not a check: uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, all of which count as arrived at this instant."""
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._break(f"the response is not valid HTTP/1.1: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request, because the endpoint or the network closed the connection."""
        self._now = time.monotonic()
        self._break(f"the connection closed before the response was complete ({exc or 'end of stream'})")

    def _break(self, detail: str) -> None:
        response = self._response
        self.close()
        if response is not None:
            response.fail(detail, self._now)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a response header."""
        if self._response is not None:
            self._response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Store the status."""
        if self._response is not None:
            self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass on bytes of the response's body, without chunk framing."""
        if self._response is not None:
            self._response.on_body(body, self._now)

    def on_message_complete(self) -> None:
        """End the response. The connection may serve the next request."""
        response = self._response
        if response is None or 100 <= response.status < 200:
            return
        self._response = None
        if self._parser.should_keep_alive():
            self.idle_since = self._now
            self._on_idle(self)
        else:
            self.close()
        response.on_complete(self._now)


class ConnectionPool:
    """Connections to one target, reused most recent first; `opened` counts all so far."""

    def __init__(self, target: Target) -> None:
        self.opened = 0
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls = ssl.create_default_context() if target.tls else None

    def __repr__(self) -> str:
        return f"<ConnectionPool {self._target.authority} opened={self.opened} idle={len(self._idle)}>"

    def acquire_idle(self) -> Connection | None:
        """Return an idle connection that may be reused, or None."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < IDLE_LIMIT_S:
                return connection
            self.discard(connection)
        return None

    async def open(self) -> Connection:
        """Open a connection.

        Raises:
            OSError: the target cannot be reached.
            TimeoutError: it does not answer in time.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._idle.append),
                self._target.host,
                self._target.port,
                ssl=self._tls,
            )
        self.opened += 1
        self._all = {one for one in self._all if one.is_open} if self.opened % 1024 == 0 else self._all
        self._all.add(connection)
        return connection

    def discard(self, connection: Connection) -> None:
        """Abort and remove a connection."""
        connection.close()
        self._all.discard(connection)

    def close(self) -> None:
        """Abort all connections."""
        for connection in tuple(self._all):
            self.discard(connection)
        self._idle.clear()
