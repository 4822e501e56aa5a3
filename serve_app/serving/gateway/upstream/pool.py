"""Kept connections to the replicas, and what happens when one cannot be had."""

import asyncio
import contextlib
import socket
from typing import Annotated

from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream.connection import UpstreamConnection
from serve_app.serving.gateway.upstream.response import (
    EngineSilentError,
    StaleConnectionError,
    UpstreamError,
    UpstreamResponse,
)
from serve_app.serving.tls import ClientTls, Tls, connect, public_tls
from serve_app.settings_base import INTERNAL, NOT_NEGATIVE, POSITIVE, settings

# Servers that we did not start close idle connections sooner than ours do: vLLM after 5 s.
_ENDPOINT_IDLE_EXPIRY_S = 4.0

# A host that vanished without a word is noticed after idle + interval x count = 20 s, also while an engine
# thinks.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2))
_UNACKNOWLEDGED_MS = 20_000


@settings(block="upstream")
class UpstreamSettings:
    """How a gateway talks to replicas; all times in seconds."""

    # Replicas are near: one that takes longer to accept is gone, and its request is better served elsewhere.
    connect_timeout_s: Annotated[float, POSITIVE] = 3.0
    # Longest silence of an engine inside one answer. A long answer that is not streamed is silent until its
    # end, so this bounds generation time there; dead hosts are found by TCP keep-alive, not by this.
    silence_timeout_s: Annotated[float, POSITIVE] = 900.0
    # A client that takes nothing of what it is sent for this long loses the rest. Its engine is freed then,
    # or as soon as it has finished.
    stalled_client_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 120.0
    # Must stay well below the replica server's own keep-alive (300 s): the side that sends requests is the
    # one that closes, or a request meets a closing connection.
    idle_expiry_s: Annotated[float, POSITIVE, INTERNAL] = 60.0
    # Kept connections per replica; more are closed after use. Costs one descriptor on both sides each.
    max_idle_per_replica: Annotated[int, NOT_NEGATIVE, INTERNAL] = 256


class UpstreamPool:
    """All connections of one gateway to its replicas; lives on one event loop.

    Args:
        tls: for replicas of our own; None connects to them without.
        https: for servers that speak HTTPS; None trusts what this machine trusts.

    Attributes:
        connects: TCP connections opened so far.
        stale_retries: requests that met a kept connection closed by its replica and went out on a new one.
    """

    def __init__(
        self, settings: UpstreamSettings, tls: Tls | None = None, https: ClientTls | None = None
    ) -> None:
        self._tls = None if tls is None else tls.as_client
        self._https = https
        self.connects = 0
        self.stale_retries = 0
        self._settings = settings
        self._idle: dict[ServerAddress, list[UpstreamConnection]] = {}
        self._all: set[UpstreamConnection] = set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        times = (settings.silence_timeout_s, settings.idle_expiry_s)
        # One timer for all connections; a limit is kept to within about a third of itself.
        self._sweep_s = min(1.0, min(times) / 3)
        self._closed = False

    def __repr__(self) -> str:
        idle = sum(len(kept) for kept in self._idle.values())
        return f"<UpstreamPool busy={len(self._all) - idle} idle={idle} connects={self.connects}>"

    async def send(self, address: ServerAddress, head: bytes, body: bytes) -> UpstreamResponse:
        """Send a request to a replica and wait for the head of its answer.

        Raises:
            UpstreamError: UNREACHABLE when the replica never saw the request, LOST when it may have.
        """
        kept = self._take_idle(address)
        if kept is not None:
            try:
                return await kept.exchange(head, body)
            except StaleConnectionError as stale:
                # The usual race with the replica's own keep-alive limit.
                self.stale_retries += 1
                try:
                    connection = await self._connect(address)
                except UpstreamError:
                    # It died as the request came in, and may have died of it: LOST, not UNREACHABLE.
                    raise stale from None
                return await connection.exchange(head, body)
        connection = await self._connect(address)
        return await connection.exchange(head, body)

    def close(self) -> None:
        """Cut every connection."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        for connection in tuple(self._all):
            connection.abort()

    # ConnectionOwner

    def on_idle(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request to its replica, or close it when enough are kept."""
        kept = self._idle.setdefault(connection.address, [])
        if len(kept) < self._settings.max_idle_per_replica and connection.is_usable:
            kept.append(connection)
        else:
            connection.abort()

    def on_lost(self, connection: UpstreamConnection) -> None:
        """Forget a connection."""
        self._all.discard(connection)
        kept = self._idle.get(connection.address)
        if kept is not None:
            with contextlib.suppress(ValueError):
                kept.remove(connection)
            if not kept:
                del self._idle[connection.address]

    def _take_idle(self, address: ServerAddress) -> UpstreamConnection | None:
        """The most recently used connection, the least likely to have been closed meanwhile."""
        kept = self._idle.get(address)
        while kept:
            connection = kept.pop()
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
            # Reads the system's certificates, which takes some milliseconds.
            self._https = public_tls()
        return self._https._replace(name=address.name or None)

    def _sweep(self) -> None:
        """Close what has been idle or silent for too long."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for connection in tuple(self._all):
            connection.silent_ticks += 1
            silent_s = connection.silent_ticks * self._sweep_s
            if connection.is_idle:
                if silent_s > self._idle_expiry_s(connection.address):
                    connection.abort()
            elif silent_s > settings.silence_timeout_s and not connection.is_paused:
                # A paused one waits for its client, whose time is limited in `answer.stalls`.
                message = f"the replica sent nothing for {settings.silence_timeout_s} s"
                connection.fail(message, EngineSilentError)
        self._sweep_timer = loop.call_later(self._sweep_s, self._sweep) if self._all else None


def _tune(sock: socket.socket | None) -> None:
    """No Nagle delay, and dead hosts are noticed."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (*_KEEPALIVE, ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS))
    for name, value in options:
        # Linux has all of them; other systems keep their own defaults.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
