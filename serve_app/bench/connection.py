"""A cheap HTTP/1.1 client: a protocol object per connection, over the parser of httptools.

A request on an idle connection starts without a task or a future. A connection that was idle for longer than
`IDLE_LIMIT_S` is not used again. Servers close theirs after a few seconds, and a request on a closing
connection would be lost without a fault of the endpoint.

It differs from the gateway's upstream client on purpose. That one slows the engine down when a client reads
slowly; this one never waits, reads the clock at every arrival of bytes, and supports TLS.

Times are read from `time.monotonic`: the clock of a uvloop event loop advances in whole milliseconds.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from serve_app.bench.answer import Answer
from serve_app.errors import ServeAppError

IDLE_LIMIT_S = 2.0
"""Below the keep-alive times of common servers (uvicorn 5 s, nginx 75 s)."""
CONNECT_TIMEOUT_S = 10.0


class BenchError(ServeAppError):
    """A benchmark cannot be run; the message states the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of the endpoint."""

    host: str
    port: int
    tls: bool
    path_prefix: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Parse `http://host:port[/prefix]`; a `/v1` at the end counts as part of the API.

        Raises:
            BenchError: the URL has another form.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise BenchError(f"cannot read URL {url!r}: {exc}") from exc
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise BenchError(f"URL must look like http://127.0.0.1:8000, got {url!r}")
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
    """One connection, for one request at a time; it passes the answer's bytes to its `Answer`.

    Attributes:
        is_open: as far as this side knows.
        idle_since: end of its last answer.
        reads: number of arrivals of bytes, which tells whether the tokens of a stream arrived one by one.
    """

    __slots__ = (
        *("_answer", "_now", "_on_idle", "_parser", "_transport"),
        *("idle_since", "is_open", "reads"),
    )

    def __init__(self, on_idle: Callable[["Connection"], object]) -> None:
        self.is_open = False
        self.idle_since = 0.0
        self.reads = 0
        self._on_idle = on_idle
        self._answer: Answer | None = None
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def start(self, request: bytes, answer: Answer) -> None:
        """Send a request; `answer` gets all bytes from now on, and ends exactly once."""
        assert self._transport is not None
        assert self._answer is None
        self._answer = answer
        self._transport.write(request)

    def close(self) -> None:
        """Cut the connection at once."""
        self.is_open = False
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ready for a request."""
        # A cast, not a check: uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer; everything in them counts as arrived at this instant."""
        self._now = time.monotonic()
        self.reads += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._break(f"the answer is not valid HTTP/1.1: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The endpoint or the network closed the connection."""
        self._now = time.monotonic()
        self._break(f"the connection closed before the answer was complete ({exc or 'end of stream'})")

    def _break(self, detail: str) -> None:
        answer = self._answer
        self.close()
        if answer is not None:
            answer.fail(detail, self._now)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        if self._answer is not None:
            self._answer.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Status line and headers are complete."""
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Bytes of the answer's body, without chunk framing."""
        if self._answer is not None:
            self._answer.on_body(body, self._now)

    def on_message_complete(self) -> None:
        """The answer is complete; the connection may serve the next request."""
        answer = self._answer
        if answer is None or 100 <= answer.status < 200:
            return
        self._answer = None
        if self._parser.should_keep_alive():
            self.idle_since = self._now
            self._on_idle(self)
        else:
            self.close()
        answer.on_complete(self._now)


class ConnectionPool:
    """Connections to one target; the latest used one is taken first.

    Attributes:
        opened: connections made so far.
    """

    def __init__(self, target: Target) -> None:
        self.opened = 0
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls = ssl.create_default_context() if target.tls else None

    def __repr__(self) -> str:
        return f"<ConnectionPool {self._target.authority} opened={self.opened} idle={len(self._idle)}>"

    def take_idle(self) -> Connection | None:
        """An idle connection that may be used; None when there is none."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < IDLE_LIMIT_S:
                return connection
            self.discard(connection)
        return None

    async def open(self) -> Connection:
        """Make a connection.

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
        """Cut a connection and drop it."""
        connection.close()
        self._all.discard(connection)

    def close(self) -> None:
        """Cut all connections."""
        for connection in tuple(self._all):
            self.discard(connection)
        self._idle.clear()
