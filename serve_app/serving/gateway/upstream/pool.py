"""The pool of connections to replicas: connects, reuses, and closes idle or silent ones.

Detection of replicas that are halted with their connections open, and release of what waits for them.

A process that is stopped, or whose node hangs, still acknowledges TCP segments, so nothing tells its clients.
Two signs together do: the scheduler has closed the replica, because its reports are missing, and the replica
answers no request for its health. Then requests without any part of their answer return to the queue, for
another replica. Answers that have begun may continue, so they end later, with an error event. While no
scheduler is connected, all replicas count as closed, and the second sign alone decides.
"""

import asyncio
import contextlib
import contextvars
import logging
import socket
from collections.abc import Callable, Collection
from typing import Annotated

from serve_app.core.events import DispatchFailure
from serve_app.core.settings_base import INTERNAL, NOT_NEGATIVE, POSITIVE, settings
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream.connection import (
    EngineSilentError,
    StaleConnectionError,
    UpstreamConnection,
    UpstreamError,
    UpstreamResponse,
)
from serve_app.serving.tls import ClientTls, Tls, connect, public_tls

# Remote servers close idle connections sooner than this application's replicas: vLLM after 5 s.
_ENDPOINT_IDLE_EXPIRY_S = 4.0

# A vanished host is detected after idle + interval x count = 20 s, also while an engine computes silently.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2))
_UNACKNOWLEDGED_MS = 20_000


@settings(block="upstream")
class UpstreamSettings:
    """Connections from a gateway to replicas; all times in seconds."""

    # Time limit for connecting; replicas are close by, so a longer time means that one is gone.
    connect_timeout_s: Annotated[float, POSITIVE] = 3.0
    # Longest silence of an engine within one answer. An answer that is not streamed is silent until its end,
    # so this bounds its generation time. Dead hosts are found sooner, by TCP keep-alive.
    silence_timeout_s: Annotated[float, POSITIVE] = 900.0
    # A client that reads nothing for this long loses the rest of its answer. Its engine is released then, or
    # as soon as it has finished.
    stalled_client_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 120.0
    # Idle time after which a connection is closed. Must stay well below the keep-alive of replicas (300 s),
    # because the side that sends requests must close; otherwise requests meet closing connections.
    idle_expiry_s: Annotated[float, POSITIVE, INTERNAL] = 60.0
    # Idle connections per replica; others are closed after use. Each costs a descriptor on both sides.
    max_idle_per_replica: Annotated[int, NOT_NEGATIVE, INTERNAL] = 256


class UpstreamPool:
    """All connections of one gateway to its replicas, on one event loop.

    Args:
        tls: for replicas of this application; None connects without TLS.
        https: for remote servers that use HTTPS; None trusts the system's certificate authorities.

    Attributes:
        connects: TCP connections opened.
        stale_retries: requests repeated on a new connection because the reused one was closed.
        on_sweep: called about every second while there are connections.
    """

    def __init__(
        self, settings: UpstreamSettings, tls: Tls | None = None, https: ClientTls | None = None
    ) -> None:
        self._tls = None if tls is None else tls.as_client
        self._https = https
        self.connects = 0
        self.stale_retries = 0
        self.on_sweep: Callable[[], None] | None = None
        self._settings = settings
        self._idle: dict[ServerAddress, list[UpstreamConnection]] = {}
        self._all: set[UpstreamConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        times = (settings.silence_timeout_s, settings.idle_expiry_s)
        # One timer serves all connections; limits are exact to about a third.
        self._sweep_s = min(1.0, min(times) / 3)
        self._closed = False

    def __repr__(self) -> str:
        idle = sum(len(connections) for connections in self._idle.values())
        return f"<UpstreamPool busy={len(self._all) - idle} idle={idle} connects={self.connects}>"

    def start(
        self, address: ServerAddress, head: bytes, body: bytes, on_change: Callable[[], None] | None = None
    ) -> UpstreamResponse:
        """Send a request to a replica, and return its response, which may fail with an `UpstreamError`.

        The failure is UNREACHABLE when the replica never saw the request, LOST when it may have.

        Args:
            on_change: see `UpstreamResponse`.
        """
        response = UpstreamResponse(on_change)
        connection = self._take_idle(address)
        if connection is not None:
            connection.send(response, head, body)
        else:
            response.connect_by(self._connect_and_send(address, response, head, body))
        return response

    async def send(self, address: ServerAddress, head: bytes, body: bytes) -> UpstreamResponse:
        """Send a request to a replica, and wait for the head of its answer.

        Raises:
            UpstreamError: as in `start`.
        """
        response = self.start(address, head, body)
        try:
            await response.started()
        except BaseException:
            # Also on cancellation, so that the engine does not work for a request without a client.
            response.close()
            raise
        return response

    def repeat(
        self,
        address: ServerAddress,
        response: UpstreamResponse,
        head: bytes,
        body: bytes,
        stale: StaleConnectionError,
    ) -> None:
        """Send a request on a new connection, because the replica had closed the reused one.

        This is the race with the replica's own keep-alive timeout.
        """
        self.stale_retries += 1
        response.connect_by(self._connect_and_send(address, response, head, body, stale))

    async def _connect_and_send(
        self,
        address: ServerAddress,
        response: UpstreamResponse,
        head: bytes,
        body: bytes,
        stale: StaleConnectionError | None = None,
    ) -> None:
        try:
            connection = await self._connect(address)
        except UpstreamError as error:
            # After a stale connection, the replica died while the request arrived, maybe because of it: LOST.
            response.break_off(stale or error)
        else:
            connection.send(response, head, body)

    def close(self) -> None:
        """Abort every connection."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        for connection in tuple(self._all):
            connection.abort()

    def silent(self, longer_than_s: float) -> set[ServerAddress]:
        """Return the replicas that have sent nothing for that long to a request in flight."""
        return {
            connection.address
            for connection in self._all
            if not (connection.is_idle or connection.paused)
            and connection.silent_ticks * self._sweep_s > longer_than_s
        }

    def give_up(self, address: ServerAddress, *, begun: bool) -> int:
        """Fail the requests at a replica that does not respond, and close its idle connections.

        Args:
            begun: also those whose answers have begun.

        Returns:
            The number of failed requests.
        """
        failed = 0
        for connection in tuple(self._all):
            if connection.address == address and (begun or connection.is_idle or connection.is_unanswered):
                failed += not connection.is_idle
                connection.fail(f"the replica {address.host}:{address.port} does not respond")
        return failed

    def on_idle(self, connection: UpstreamConnection) -> None:
        """Add a connection to the idle ones of its replica, or close it if there are enough."""
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) < self._settings.max_idle_per_replica:
            idle.append(connection)
        else:
            connection.abort()

    def on_lost(self, connection: UpstreamConnection) -> None:
        """Remove a closed connection."""
        self._all.discard(connection)
        idle = self._idle.get(connection.address)
        if idle is not None:
            with contextlib.suppress(ValueError):
                idle.remove(connection)
            if not idle:
                del self._idle[connection.address]

    def _take_idle(self, address: ServerAddress) -> UpstreamConnection | None:
        """Return the most recently used idle connection, which is the least likely to be closed."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self, address: ServerAddress) -> UpstreamConnection:
        host, port = address[:2]
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self, address)
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                transport, _ = await connect(lambda: connection, host, port, self._tls_for(address))
        except TimeoutError as exc:
            message = f"replica {host}:{port} accepted no connection in {self._settings.connect_timeout_s} s"
            raise UpstreamError(DispatchFailure.UNREACHABLE, message) from exc
        except OSError as exc:
            raise UpstreamError(DispatchFailure.UNREACHABLE, f"replica {host}:{port}: {exc}") from exc
        _tune(transport.get_extra_info("socket"))
        self.connects += 1
        self._all.add(connection)
        if self._sweep_timer is None and not self._closed:
            self._sweep_timer = loop.call_later(self._sweep_s, self._sweep)
        return connection

    def _idle_expiry_s(self, address: ServerAddress) -> float:
        longest_s = self._settings.idle_expiry_s
        return min(longest_s, _ENDPOINT_IDLE_EXPIRY_S) if address.scheme else longest_s

    def _tls_for(self, address: ServerAddress) -> ClientTls | None:
        match address.scheme:
            case "":
                return self._tls
            case "http":
                return None
        if self._https is None:
            # Loads the system's certificates, which takes some milliseconds.
            self._https = public_tls()
        return self._https._replace(name=address.name or None)

    def _sweep(self) -> None:
        """Close connections that were idle, or whose replica sent nothing, for too long."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for connection in tuple(self._all):
            connection.silent_ticks += 1
            silent_s = connection.silent_ticks * self._sweep_s
            if connection.is_idle:
                if silent_s > self._idle_expiry_s(connection.address):
                    connection.abort()
            elif silent_s > settings.silence_timeout_s and not connection.paused:
                # A paused connection waits for its client; the HTTP server limits that.
                message = f"the replica sent nothing for {settings.silence_timeout_s} s"
                connection.fail(message, EngineSilentError)
        self._sweep_timer = loop.call_later(self._sweep_s, self._sweep) if self._all else None
        if self.on_sweep is not None:
            self.on_sweep()


def _tune(sock: socket.socket | None) -> None:
    """Disable Nagle's algorithm and enable detection of dead hosts."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS))
    for name, value in options:
        # Linux has all of these options; other systems use their defaults.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


logger = logging.getLogger("ray.serve")

# Silence of an answer before its replica is suspected. Prefills of long prompts are silent for longer.
_SILENT_S = 2.0
_PROBE_TIMEOUT_S = 2.0
# Failed probes in succession until requests without an answer are released, and until begun answers end.
_RELEASE_AFTER, _END_AFTER = 2, 15


class HaltWatch:
    """Watch over the replicas for which requests of one gateway wait; `check` runs with every sweep.

    Args:
        open_servers: returns the servers that the schedulers consider healthy.
    """

    def __init__(self, upstream: UpstreamPool, open_servers: Callable[[], Collection[ServerAddress]]) -> None:
        self._upstream = upstream
        self._open_servers = open_servers
        self._probes: dict[ServerAddress, asyncio.Task[None]] = {}
        upstream.on_sweep = self.check

    def __repr__(self) -> str:
        return f"<HaltWatch probing {len(self._probes)}>"

    def check(self) -> None:
        """Start to probe replicas that are closed and silent; end the probes of others."""
        silent = self._upstream.silent(_SILENT_S)
        suspects = silent.difference(self._open_servers()) if silent else silent
        for address in self._probes.keys() - suspects:
            self._probes.pop(address).cancel()
        for address in suspects - self._probes.keys():
            # In an empty context, because Ray Serve cancels the tasks of a request with it.
            self._probes[address] = asyncio.get_running_loop().create_task(
                self._probe(address), context=contextvars.Context()
            )

    def close(self) -> None:
        """End all probes."""
        for task in self._probes.values():
            task.cancel()
        self._probes.clear()

    async def _probe(self, address: ServerAddress) -> None:
        failed = 0
        while failed < _END_AFTER:
            began = asyncio.get_running_loop().time()
            failed = 0 if await self._responds(address) else failed + 1
            if failed in {_RELEASE_AFTER, _END_AFTER}:
                released = self._upstream.give_up(address, begun=failed == _END_AFTER)
                if released:
                    logger.error("event=replica_halted replica=%s:%d requests=%d", *address[:2], released)
            passed_s = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.0, _PROBE_TIMEOUT_S - passed_s))

    async def _responds(self, address: ServerAddress) -> bool:
        """Return whether the server sends any HTTP response."""
        head = f"GET /health HTTP/1.1\r\nhost: {address.name or address.host}\r\ncontent-length: 0\r\n\r\n"
        with contextlib.suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                response = await self._upstream.send(address, head.encode(), b"")
                response.close()
                return True
        return False
