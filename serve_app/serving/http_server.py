"""HTTP/1.1 server on httptools and the running event loop.

`HttpServer` accepts connections and enforces limits, `Connection` parses requests, `Exchange` is one request
and its response. An application is a callable that receives each exchange; `asgi_application` adapts
ASGI applications. It is called once the head has been read, with the whole body if that arrived together with
the head, and may respond at once, later by callbacks, or in a task (`Exchange.run`). Rules:

- Responses are sent in the order of the requests. A pipelined request waits until the previous response is
  complete and the client has read enough of it. Reading and parsing pause until then, so that a connection
  holds few requests, about one read of bytes, and one response above the limit of the write buffer.
- Backpressure works in both directions. Reading pauses while more than `_BODY_BUFFER_BYTES` of a body are
  buffered. While the client does not read, `drain` waits and `write_chunk` returns False.
- The head is limited in size and time, idle connections in time. A TLS handshake counts as a connection, and
  is limited in time like a head. What frames a body (sizes and extensions of chunks, trailers) is limited
  like a head, from one piece of the body to the next.
- If a response ends before the body of its request, or rejects the head, the rest is read and dropped for a
  while. Closing at once would reset the connection, and the client could lose the response.
- Timeouts are enforced one check (a second) late, so that a process resumed after a suspension first reads
  what arrived in that time.
- A client that reads nothing cannot keep its connection: while bytes are buffered for it and more wait, or
  the connection closes, it is aborted after `stalled_s`.
- The head of a response is sent with the first piece of its body, in one segment.

Several processes may accept from the same socket. They take turns: the one with the fewest connections
accepts the next one. If it is busy for 2 ms, another one accepts one connection. `stop` then loses no
request:

1. The server accepts no more connections; they wait in the kernel for another process.
2. Each connection gets one more response, with `connection: close`.
3. Connections that are idle for `STOPPING_IDLE_TIMEOUT_S` are closed. In-flight responses may continue until
   the deadline, and are then aborted.

Without `shares_socket`, idle connections are closed at once.
"""

import asyncio
import contextlib
import http
import logging
import re
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from time import time
from urllib.parse import unquote

import httptools

from serve_app.engines.engine import ASGIApp, Message, Scope
from serve_app.errors import ServeAppError

logger = logging.getLogger("ray.serve")

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
# From the start of the connection, or the first byte of a later head.
HEAD_TIMEOUT_S = 30.0
# Time to read the rest of a body after the response to its request.
REST_OF_BODY_TIMEOUT_S = 5.0
# Bytes that are read and dropped after an invalid head.
_MAX_DROPPED_BYTES = 1024 * 1024
# Idle timeout of a stopping server: a client that was idle for this long is unlikely to send just then.
STOPPING_IDLE_TIMEOUT_S = 2.0
# Time for the last bytes of aborted responses.
_LAST_BYTES_S = 1.0
# Connections accepted in one iteration of the event loop, the pause after an error, and the time for another
# process to accept in its turn.
_ACCEPTED_AT_ONCE, _ACCEPT_PAUSE_S, _TURN_S = 16, 1.0, 0.002
# Interval of timeout checks.
CHECK_INTERVAL_S = 1.0
# Connections above the limit that receive an error response; further ones are reset.
_OVERLOAD_CONNECTIONS = 4096

_BODY_BUFFER_BYTES = 64 * 1024
# Bytes that are parsed at once; if they contain pipelined requests, the rest is parsed after these.
_PARSED_BYTES = 16 * 1024
# Longer pieces are written separately from the head, because a copy would cost more.
_MAX_COALESCED_BYTES = 64 * 1024
_INVALID_IN_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_INVALID_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NO_BODY_STATUSES = frozenset({204, 304})
_VERSIONS = frozenset({"1.0", "1.1"})
# Headers of a response that the server interprets.
_INTERPRETED = frozenset({b"connection", b"content-length", b"transfer-encoding"})
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})


class ServerNotRunningError(ServeAppError):
    """An HTTP server accepts no connections: it has not been started, or has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServerOptions:
    """Limits and features of a server.

    Attributes:
        idle_s: timeout of connections between two requests.
        stalled_s: timeout of clients that read nothing while bytes for them are buffered; None for no limit.
        max_connections: maximum number of connections; None for no limit.
        overload: application that responds to connections above that limit.
        send_date: whether responses have a `date`.
        tls: context for TLS; None to accept unencrypted connections.
        shares_socket: whether other processes accept from the same socket; see the module.
    """

    idle_s: float
    stalled_s: float | None = None
    max_connections: int | None = None
    overload: "Application | None" = None
    send_date: bool = True
    tls: ssl.SSLContext | None = None
    shares_socket: bool = False


def _always(_: int) -> bool:
    return True


class HttpServer:
    """HTTP server of an application on a listening socket.

    Args:
        name: name of the application in messages.

    Attributes:
        stopping: whether the server is stopping; each connection then closes after its next response.
        closes_idle: whether connections are closed as soon as they have no request.
        tasks: those of exchanges that are served by one.
    """

    def __init__(self, name: str, app: "Application", options: HttpServerOptions) -> None:
        self.app = app
        self.stopping = False
        self.closes_idle = False
        self.tasks: set[asyncio.Task[None]] = set()
        self._name = name
        self._options = options
        self._date = (0, b"")
        self._socket: socket.socket | None = None
        self._has_turn: Callable[[int], bool] = _always
        self._connections: set[Connection] = set()
        self._handshakes: dict[Connection, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()
        self._check_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"HttpServer({self._name}, connections={self.connections})"

    @property
    def connections(self) -> int:
        """Number of open connections, including those that are accepted or in a TLS handshake."""
        return len(self._connections) + len(self._handshakes)

    async def start(self, sock: socket.socket, has_turn: Callable[[int], bool] = _always) -> None:
        """Accept connections on a listening socket.

        Args:
            has_turn: receives the number of connections whenever it changes, and returns whether this process
                should accept the next one, rather than others that share the socket.
        """
        self._socket, self._has_turn = sock, has_turn
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket, *, in_turn: bool = True) -> None:
        """Accept waiting connections in this process' turn; without `in_turn`, the first in any case."""
        for _ in range(_ACCEPTED_AT_ONCE):
            has_turn = self._has_turn(self.connections)
            if in_turn and not has_turn:
                self._pause_accepting(listening, _TURN_S)
                return
            in_turn = True
            try:
                sock, _address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Files or memory are used up, and the connections that wait would be reported again at once.
                logger.error("event=accept_failed reason=%r", str(error))  # noqa: TRY400 - it says all
                self._pause_accepting(listening, _ACCEPT_PAUSE_S)
                return
            self._begin(sock)

    def _pause_accepting(self, sock: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        loop.call_later(seconds, self._resume_accepting, sock)

    def _resume_accepting(self, sock: socket.socket) -> None:
        if not self.stopping:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)
            # One that is still waiting, because the process whose turn it was is busy or halted.
            self._accept(sock, in_turn=False)

    def check_health(self) -> None:
        """Raise `ServerNotRunningError` if the server accepts no connections."""
        if self._socket is None:
            raise ServerNotRunningError(f"the HTTP server of {self._name} has not been started")
        if self.stopping:
            raise ServerNotRunningError(f"the HTTP server of {self._name} has ended")

    async def stop(self, grace_s: float, abort: Callable[[], object] = lambda: None) -> None:
        """Stop: wait up to `grace_s` seconds for in-flight responses, then abort them. Idempotent.

        Args:
            abort: called after that time, so that the application can first end its responses with a reason.
        """
        if self._socket is None or self.stopping:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        self.stopping = True
        loop.remove_reader(self._socket)
        self._socket.close()
        if not self._options.shares_socket:
            # The peers are gateways, which retry a request if its connection was closed.
            self.closes_idle = True
            for connection in tuple(self._connections):
                if connection.is_idle:
                    connection.close()
            self._end_handshakes()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._all_closed()
        self._end_handshakes()
        for task in tuple(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(tuple(self.tasks), timeout=1.0)
        abort()
        for connection in tuple(self._connections):
            connection.abort_response()
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_S):
                await self._all_closed()
        for connection in tuple(self._connections):
            # The client does not read.
            connection.transport.abort()

    async def _all_closed(self) -> None:
        while self.connections:
            self._closed.clear()
            await self._closed.wait()

    def _end_handshakes(self) -> None:
        for handshake in tuple(self._handshakes.values()):
            handshake.cancel()

    # Called by connections.

    def register(self, connection: "Connection") -> "Application | None":
        """Register a new connection, and return its application, or None to reset it."""
        self._connections.add(connection)
        self._handshakes.pop(connection, None)
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_timeouts)
        limit = self._options.max_connections
        return self.app if limit is None or self.connections <= limit else self._options.overload

    def _begin(self, sock: socket.socket) -> None:
        """Begin a connection, with its TLS handshake, or close it if there are far too many."""
        limit = self._options.max_connections
        if limit is not None and self.connections >= limit + _OVERLOAD_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        connection = Connection(self)
        task = asyncio.get_running_loop().create_task(self._handshake(connection, sock))
        self._handshakes[connection] = task
        task.add_done_callback(lambda _: self._end_handshake(connection))

    async def _handshake(self, connection: "Connection", sock: socket.socket) -> None:
        tls = self._options.tls
        # The client fails, disconnects or is too slow.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HEAD_TIMEOUT_S,
            )

    def _end_handshake(self, connection: "Connection") -> None:
        if self._handshakes.pop(connection, None) is not None:
            # It failed, which asyncio does not report to the connection.
            connection.connection_lost(None)

    def unregister(self, connection: "Connection") -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)
        self._has_turn(self.connections)
        self._closed.set()

    def date_line(self) -> bytes:
        """Return the `date` header line of a response; empty if responses have none."""
        if not self._options.send_date:
            return b""
        now = int(time())
        if now != self._date[0]:
            self._date = now, b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
        return self._date[1]

    def _check_timeouts(self) -> None:
        """Enforce timeouts every second while there are connections."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        idle_s = min(self._options.idle_s, STOPPING_IDLE_TIMEOUT_S) if self.stopping else self._options.idle_s
        for connection in tuple(self._connections):
            connection.check_timeouts(now, idle_s)
            connection.check_reading(self._options.stalled_s)
        self._check_timer = (
            loop.call_later(CHECK_INTERVAL_S, self._check_timeouts) if self._connections else None
        )


class _Head:
    """The head of a request as far as it has been received."""

    __slots__ = ("expects_continue", "headers", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: Headers = []
        self.expects_continue = False

    @property
    def size(self) -> int:
        """Bytes received, without its version and its end."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)


class Connection(asyncio.Protocol):
    """One connection: parses requests and runs them one after the other.

    A client may request an upgrade to another protocol, as Java's HttpClient does with `Upgrade: h2c`. The
    parser then treats what follows the head as that protocol, not as a body. Upgrades are ignored: the head
    is parsed again without them.
    """

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.write_paused = False
        self._loop = asyncio.get_running_loop()
        # None after a malformed request and at the end.
        self._parser: httptools.HttpRequestParser | None = _parser_of(self)
        # Received, but not parsed yet.
        self._unparsed = b""
        self.transport: asyncio.Transport
        self.server_address: tuple[str, int] | None = None
        self.client_address: tuple[str, int] | None = None
        self.is_encrypted = False
        self._app: Application
        self._writable = asyncio.Event()
        self._read_paused = False
        # The current request, whether the application has received it, the queued ones, and the last one.
        self._active: Exchange | None = None
        self._is_started = False
        self._waiting: deque[Exchange] = deque()
        self._last: Exchange | None = None
        # The first byte of that head, or the start of the connection; None as long as there is none.
        self._head_since: float | None = None
        self._response_ended_at = 0.0
        # Bytes that the client had not read at the last check, and the checks since it has read any.
        self._unread_bytes = 0
        self._stalled_checks = 0
        # Start of the timeout that had elapsed at the last check; None if none had.
        self._elapsed_since: float | None = None
        # Closes once the rest of a request has been read and dropped.
        self._closes = False
        # The head being received; None between the end of a head and the beginning of the next.
        self._head: _Head | None = None
        # Bytes received since a head, a piece of a body or a request was complete.
        self._framing_bytes = 0
        self._head_without_upgrade = b""

    # asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of sockets
        """Accept the connection, or reset it if there are far too many."""
        self.transport = transport
        self._head_since = self._loop.time()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Keepalive detects hosts that have vanished.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.server_address = _address(transport.get_extra_info("sockname"))
        self.client_address = _address(transport.get_extra_info("peername"))
        self.is_encrypted = transport.get_extra_info("sslcontext") is not None
        app = self.server.register(self)
        if app is None:
            transport.abort()
        else:
            self._app = app

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio passes it
        """Notify the open requests."""
        self.server.unregister(self)
        # The parser refers to this object.
        self._parser = None
        self._writable.set()
        if self._active is not None:
            self._active.handle_disconnect()
        for exchange in self._waiting:
            exchange.handle_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests, except those behind a request that waits."""
        if self._parser is None:
            self._framing_bytes += len(data)
            if self._closes and self._framing_bytes > _MAX_DROPPED_BYTES:
                self.transport.close()
            return
        if self._unparsed:
            data, self._unparsed = self._unparsed + data, b""
        start = 0
        while start < len(data):
            if self._waiting:
                self._unparsed = data[start:]
                self.pause_reading()
                break
            try:
                self._parse(data[start : start + _PARSED_BYTES])
            except httptools.HttpParserError:
                self._start()
                self._reject(400, self._excess() or "Invalid HTTP request received.")
                return
            start += _PARSED_BYTES
        self._start()
        if excess := self._excess():
            self._reject(400, excess)

    def _excess(self) -> str:
        """Return which limit the framing of the request exceeds; empty if none."""
        if self._framing_bytes <= MAX_HEAD_BYTES:
            return ""
        part = "chunk framing" if self._head is None else "head"
        return f"The request's {part} is longer than {MAX_HEAD_BYTES} bytes."

    def _parse_rest(self) -> None:
        self.data_received(b"")
        self.resume_reading()

    def _parse(self, data: bytes) -> None:
        while (parser := self._parser) is not None:
            self._framing_bytes += len(data)
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                head, self._head_without_upgrade = self._head_without_upgrade, b""
                self._parser = _parser_of(self)
                data = head + data[upgrade.args[0] :]
            else:
                break

    def pause_writing(self) -> None:
        """Pause writing, because the write buffer is full."""
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """Resume writing, because the client has read."""
        self.write_paused = False
        self._unread_bytes = self._stalled_checks = 0
        self._writable.set()
        if (exchange := self._active) is None:
            self._next()
        elif exchange.on_writable is not None:
            exchange.on_writable()

    # httptools.

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._head_since is None:
            self._head_since = self._loop.time()
        self._head = _Head()

    def on_url(self, url: bytes) -> None:
        """Append bytes to the target, which may arrive in several pieces."""
        assert self._head is not None, "called by the parser"
        self._head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a header; trailers are dropped."""
        if (head := self._head) is None:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            head.expects_continue = True
        head.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Run the request, or queue it behind the previous one."""
        parser, head = self._parser, self._head
        assert parser is not None, "called by the parser"
        assert head is not None, "called by the parser"
        # The bytes may include a part of the body.
        if self._framing_bytes > MAX_HEAD_BYTES and head.size > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
        self._head = self._head_since = None
        self._framing_bytes = 0
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        if method == "CONNECT" or version not in _VERSIONS:
            raise ValueError(f"{method} with HTTP/{version} is not supported")
        if parser.should_upgrade():
            self._head_without_upgrade = head_without_upgrade(method, head.url, head.headers)
            return
        exchange = Exchange(self, method, version, head.url, head.headers)
        exchange.keep_alive = version != "1.0" and parser.should_keep_alive()
        exchange.expects_continue = head.expects_continue
        self._last = exchange
        if self._active is None and not self.write_paused:
            self._active, self._is_started = exchange, False
        else:
            self.pause_reading()
            self._waiting.append(exchange)

    def on_body(self, body: bytes) -> None:
        """Pass a piece of a body to its request."""
        self._framing_bytes = 0
        if self._last is not None and not self._head_without_upgrade:
            self._last.add_body(body)

    def on_message_complete(self) -> None:
        """Mark the body of the request as complete."""
        self._framing_bytes = 0
        if self._last is not None and not self._head_without_upgrade:
            self._last.end_body()
        if self._closes:
            self.transport.close()

    # Used by exchanges.

    def pause_reading(self) -> None:
        """Pause reading, for backpressure. Idempotent."""
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading once all bytes are parsed, unless the connection is closing. Idempotent."""
        if not self._read_paused or self.transport.is_closing():
            return
        if not self._unparsed:
            self._read_paused = False
            self.transport.resume_reading()
            if self._head_since is not None:
                self._head_since = self._loop.time()
        elif not self._waiting:
            # Not here, because an application that responds at once would call this method again.
            self._loop.call_soon(self._parse_rest)

    async def drain(self) -> None:
        """Wait until the client reads or disconnects."""
        if self.write_paused:
            await self._writable.wait()

    def on_response_end(self, *, keep_alive: bool) -> None:
        """End the current request, and run the next."""
        self._response_ended_at = self._loop.time()
        self._active = None
        if not keep_alive and self._last is not None and self._last.more_body:
            self._close_after_rest()
        elif not keep_alive or (self.server.closes_idle and not self._waiting):
            self.transport.close()
        self._next()

    def _close_after_rest(self) -> None:
        """Close the connection once the client has sent the rest of its request, or after a while."""
        self._closes, self._response_ended_at = True, self._loop.time()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _next(self) -> None:
        """Run the next request, unless the client does not read, and read further ones."""
        if self.transport.is_closing():
            return
        if self._waiting and not self.write_paused:
            self._active, self._is_started = self._waiting.popleft(), False
            # Not here, because an application that responds at once would call this method again.
            self._loop.call_soon(self._start)
        if not self._waiting:
            self.resume_reading()

    # Used by the server.

    @property
    def is_idle(self) -> bool:
        """True if no request is open or arriving."""
        return self._active is None and not self._waiting and self._head is None

    def close(self) -> None:
        """Close after pending writes."""
        self.transport.close()

    def check_timeouts(self, now: float, idle_s: float) -> None:
        """Enforce timeouts that had already elapsed at the last check."""
        if self._closes:
            since, limit_s = self._response_ended_at, REST_OF_BODY_TIMEOUT_S
        elif self._waiting:
            # The server does not read.
            self._elapsed_since = None
            return
        elif self._head_since is not None:
            since, limit_s = self._head_since, HEAD_TIMEOUT_S
        elif self._active is None and self._last is not None:
            since = self._response_ended_at
            limit_s = REST_OF_BODY_TIMEOUT_S if self._last.more_body else idle_s
        else:
            self._elapsed_since = None
            return
        if now - since < limit_s:
            self._elapsed_since = None
        elif self._elapsed_since != since:
            self._elapsed_since = since
        elif self._head is not None and not self._closes:
            self._reject(408, f"The request's head was not complete within {HEAD_TIMEOUT_S:g} s.")
        else:
            self.transport.close()

    def check_reading(self, stalled_s: float | None) -> None:
        """Abort the connection if its client has read none of the buffered bytes for `stalled_s`."""
        if stalled_s is None or not (self.write_paused or self.transport.is_closing()):
            return
        unread_bytes = self.transport.get_write_buffer_size()
        has_read, self._unread_bytes = unread_bytes < self._unread_bytes, unread_bytes
        self._stalled_checks = 0 if has_read else self._stalled_checks + 1
        if self._stalled_checks * CHECK_INTERVAL_S > stalled_s:
            self.transport.abort()

    def abort_response(self) -> None:
        """End the current request with an error, or cut its response, because the server stops."""
        if self._active is not None and self._is_started:
            self._active.abort()

    def _start(self) -> None:
        """Pass the current request to the application, once."""
        exchange = self._active
        if exchange is None or self._is_started or exchange.disconnected:
            return
        self._is_started = True
        try:
            self._app(exchange)
        except Exception:
            logger.exception("event=http_error path=%r", exchange.path)
            exchange.fail()

    def _reject(self, status: int, message: str) -> None:
        """Stop parsing, with an error response if possible; earlier requests still get their responses."""
        self._parser, self._unparsed = None, b""
        last = self._last
        if last is not None and last.more_body and (last.status or last is not self._active):
            self.transport.close()
            return
        if last is not None and not last.more_body and not last.response_complete:
            last.keep_alive = False
            return
        if not self.transport.is_closing():
            head = b"%bcontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            start = _STATUS_LINES[status] + self.server.date_line()
            self.transport.write(head % (start, len(message)) + message.encode())
            self._close_after_rest()


class Exchange:
    """One request and its response.

    An application responds with `respond`, or with `start_response` and `write_chunk`. In a task it may wait
    for the client by `receive` and `drain`.

    HTTP/1.0 has no chunks (RFC 9112, 6.1), so a response of unknown length ends with its connection. nginx,
    among others, declares 1.0 by default when it forwards, so buffering such responses would disable
    streaming for its clients.

    Attributes:
        method: HTTP method.
        path: decoded path, without the query. An application may remove a prefix.
        raw_path: path as sent.
        query: query string, without the question mark.
        version: HTTP version.
        headers: request headers, names in lower case.
        keep_alive: whether the connection may serve another request.
        expects_continue: whether the client waits for `100 Continue` before it sends the body.
        more_body: the request's body is incomplete.
        disconnected: the client has disconnected.
        status: status of the response; 0 before it has started.
        response_complete: the response has been written.
        on_disconnect: called if the client disconnects before the response is complete.
        on_writable: called when more can be written after `write_chunk` returned False.
        added_headers: headers that are added to the response.
        caller: identity of a request from within the process; None for requests of clients.
    """

    __slots__ = (
        "_arrival",
        "_body",
        "_chunked",
        "_connection",
        "_has_news",
        "_head",
        "_remaining_bytes",
        "added_headers",
        "caller",
        "disconnected",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "more_body",
        "on_disconnect",
        "on_writable",
        "path",
        "query",
        "raw_path",
        "response_complete",
        "status",
        "version",
    )

    def __init__(
        self, connection: Connection, method: str, version: str, url: bytes, headers: Headers
    ) -> None:
        parsed = httptools.parse_url(url)
        path = parsed.path.decode("ascii")
        self.method = method
        self.path = unquote(path) if "%" in path else path
        self.raw_path: bytes = parsed.path
        self.query: bytes = parsed.query or b""
        self.version = version
        self.headers = headers
        self.keep_alive = True
        self.expects_continue = False
        self.more_body = True
        self.disconnected = False
        self.status = 0
        self.response_complete = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.added_headers: Headers = []
        self.caller: object | None = None
        self._connection = connection
        self._body: bytes | bytearray = b""
        # Whether `receive` has something to return, and its event once it has had to wait.
        self._has_news = False
        self._arrival: asyncio.Event | None = None
        self._head = b""
        self._chunked = False
        # Remaining bytes of the declared length; None without one.
        self._remaining_bytes: int | None = None

    @property
    def client(self) -> tuple[str, int] | None:
        """Address of the client; None for a Unix socket."""
        return self._connection.client_address

    @property
    def server(self) -> tuple[str, int] | None:
        """Address on which the request arrived; None for a Unix socket."""
        return self._connection.server_address

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "https" if self._connection.is_encrypted else "http"

    @property
    def is_choked(self) -> bool:
        """True while the client does not read what was written."""
        return self._connection.write_paused

    # Called by the connection.

    def add_body(self, piece: bytes) -> None:
        """Buffer a piece of the body."""
        if self.response_complete:
            return
        if not self._body:
            self._body = piece
        elif isinstance(self._body, bytes):
            self._body = bytearray(self._body) + piece
        else:
            self._body += piece
        if len(self._body) > _BODY_BUFFER_BYTES:
            self._connection.pause_reading()
        self._notify()

    def end_body(self) -> None:
        """Mark the body as complete."""
        self.more_body = False
        self._notify()

    def handle_disconnect(self) -> None:
        """Notify the application that the connection was closed."""
        if self.response_complete:
            return
        self.disconnected = True
        self._notify()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _notify(self) -> None:
        self._has_news = True
        if self._arrival is not None:
            self._arrival.set()

    # Called by the application.

    def run(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Serve the request in a task; if that fails, send an error or cut the response.

        The task must complete the response, or set `on_disconnect` and leave the rest to callbacks.
        """
        tasks = self._connection.server.tasks
        task = asyncio.get_running_loop().create_task(self._run(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _run(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            # The server is stopping.
            self.fail()
        except Exception:
            logger.exception("event=http_error path=%r", self.path)
            self.fail()
        else:
            if not self.response_complete and not self.disconnected and self.on_disconnect is None:
                logger.error("event=http_error path=%r reason='incomplete response'", self.path)
                self.fail()

    def take_body(self) -> bytes:
        """Return the whole body, if `more_body` is False."""
        body, self._body, self._has_news = self._body, b"", False
        return body if isinstance(body, bytes) else bytes(body)

    async def receive(self) -> bytes | None:
        """Return the next piece of the body; it is the last one if `more_body` is False then.

        Returns:
            None once the client has disconnected or the response is complete; a call after the last piece
            waits for that.
        """
        if self.expects_continue and not self._connection.transport.is_closing():
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.expects_continue = False
        if not self.disconnected and not self.response_complete:
            self._connection.resume_reading()
            if not self._has_news:
                self._arrival = self._arrival or asyncio.Event()
                self._arrival.clear()
                await self._arrival.wait()
            self._has_news = False
        return None if self.disconnected or self.response_complete else self.take_body()

    async def drain(self) -> None:
        """Wait until the client has read enough of what was written, or has disconnected."""
        if not self.disconnected:
            await self._connection.drain()

    def respond(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Write a whole response, to which the length of the body is added."""
        self.start_response(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.write_chunk(body, ends=True)

    def start_response(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes = b"") -> None:
        """Start the response; its head is written with the first piece of the body.

        Args:
            lines: further header lines, which are valid.

        Raises:
            RuntimeError: it was started before, or a header is not valid.
        """
        if self.disconnected:
            return
        if self.status:
            raise RuntimeError("a response was started twice")
        self.status = status
        self.expects_continue = False
        self._head = self._render_head(status, headers, lines)

    def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
        """Write a piece of a response that has begun; return whether there is room for more.

        Pieces are buffered if there is no room; `on_writable` is called when writing may continue.

        Args:
            ends: the piece is the last one.

        Raises:
            RuntimeError: the response does not have its declared length.
        """
        if self.disconnected:
            return True
        if not self.status or self.response_complete:
            raise RuntimeError("a part of a body was sent before the start of a response, or after its end")
        if self.method == "HEAD":
            piece, self._remaining_bytes = b"", None
        if self._remaining_bytes is not None:
            self._check_length(len(piece), ends=ends)
        connection = self._connection
        head, self._head = self._head, b""
        if self._chunked:
            piece = b"%b%x\r\n%b\r\n" % (head, len(piece), piece) if piece else head
            if ends:
                piece += b"0\r\n\r\n"
        elif len(piece) <= _MAX_COALESCED_BYTES:
            piece = head + piece
        elif head:
            connection.transport.write(head)
        if piece:
            connection.transport.write(piece)
        if ends:
            self.response_complete = True
            self.on_disconnect = self.on_writable = None
            self._notify()
            connection.on_response_end(keep_alive=self.keep_alive)
        return not connection.write_paused

    def _check_length(self, added_bytes: int, *, ends: bool) -> None:
        """Count a piece of a response that has declared its length."""
        assert self._remaining_bytes is not None
        self._remaining_bytes -= added_bytes
        if self._remaining_bytes < 0:
            excess = -self._remaining_bytes
            raise RuntimeError(f"the response body exceeds its content-length by {excess} bytes")
        if ends and self._remaining_bytes:
            missing = self._remaining_bytes
            raise RuntimeError(f"the response body is {missing} bytes shorter than its content-length")

    def _render_head(self, status: int, headers: Iterable[tuple[bytes, bytes]], more: bytes) -> bytes:
        server = self._connection.server
        lines = [_STATUS_LINES[status], server.date_line(), more]
        has_length = closes = False
        for name, value in (*headers, *self.added_headers):
            key = _lower_name(name)
            if _INVALID_IN_VALUE.search(value):
                raise RuntimeError(f"invalid characters in the name or value of header {name!r}")
            if key in _INTERPRETED:
                if key == b"content-length":
                    self._remaining_bytes, has_length = int(value), True
                elif key == b"transfer-encoding":
                    continue  # added below
                elif b"close" in value.lower():
                    closes = True
            lines += (key, b": ", value, b"\r\n")
        if closes or server.stopping:
            self.keep_alive = False
        if not has_length and self.method != "HEAD" and status not in _NO_BODY_STATUSES:
            if self.version == "1.0":
                self.keep_alive = False
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def abort(self) -> None:
        """End the request as a failure, and notify the application as of a disconnect."""
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        self.fail()
        if on_disconnect is not None:
            on_disconnect()

    def fail(self) -> None:
        """Respond with an internal error or, if the response has started, close the connection."""
        if self.response_complete or self.disconnected:
            return
        if self.status:
            # A partial response must not look complete.
            self._connection.transport.close()
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        self.respond(500, headers, b"Internal Server Error")


Application = Callable[[Exchange], None]
"""Serves requests; called once for each."""


# Responses have few different names, most of them constants of the application.
@lru_cache(maxsize=256)
def _lower_name(name: bytes) -> bytes:
    """Return the name of a header in lower case; raise `RuntimeError` if it is invalid."""
    if _INVALID_IN_NAME.search(name):
        raise RuntimeError(f"invalid characters in the name or value of header {name!r}")
    return name.lower()


def head_without_upgrade(method: str, url: bytes, headers: Headers) -> bytes:
    """Return a request's head without its request for an upgrade."""
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), url)]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            remaining = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
            lines.append(b"connection: %b" % remaining)
        elif name not in _UPGRADE_HEADERS:
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _parser_of(connection: Connection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    # Clients may send `connection: close` with a request and then further ones.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _address(name: object) -> tuple[str, int] | None:
    """Return host and port of an internet address; None for a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _status_line(status: int) -> bytes:
    phrase = ""
    with contextlib.suppress(ValueError):
        phrase = http.HTTPStatus(status).phrase
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}

_ASGI = {"version": "3.0", "spec_version": "2.3"}


def asgi_application(app: ASGIApp) -> Application:
    """Return the application that serves each request with an ASGI application, in a task."""

    def serve(exchange: Exchange) -> None:
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "server": exchange.server,
            "client": exchange.client,
            "scheme": exchange.scheme,
            "root_path": "",
            "http_version": exchange.version,
            "method": exchange.method,
            "path": exchange.path,
            "raw_path": exchange.raw_path,
            "query_string": exchange.query,
            "headers": exchange.headers,
        }
        exchange.run(_call(app, scope, exchange))

    return serve


async def _call(app: ASGIApp, scope: Scope, exchange: Exchange) -> None:
    async def receive() -> Message:
        piece = await exchange.receive()
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": exchange.more_body}

    async def send(message: Message) -> None:
        await exchange.drain()
        if message["type"] == "http.response.start":
            exchange.start_response(message["status"], message.get("headers", ()))
        else:
            exchange.write_chunk(message.get("body", b""), ends=not message.get("more_body", False))

    await app(scope, receive, send)
