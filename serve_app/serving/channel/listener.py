"""The scheduler's port: accepts connections, and bounds those that have not introduced themselves.

Anybody on the network may connect, so a connection is counted from the moment that it is accepted, before
anything is read from it, and it has `handshake_s` to introduce itself, from then on. At the limit no more are
accepted: peers wait in the kernel's queue until a place is free. Meanwhile the time for an introduction is
shorter, so that strangers who hold their places in silence do not keep peers out. Nobody is sent away before
that time, because the oldest of a crowd of real peers are those who are just about to speak.
"""

import asyncio
import contextvars
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.serving.channel.link import Link
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.listening import listening_socket
from serve_app.serving.tls import made_tls

logger = logging.getLogger("ray.serve")

# Peers that wait for a place; the kernel may allow fewer (net.core.somaxconn).
_BACKLOG = 4096
# Of `handshake_s`, while others wait: 0.25 s, when a peer needs some milliseconds.
_HURRIED_SHARE = 0.25
# Without descriptors, each attempt fails at once: do not spin.
_NO_DESCRIPTOR_PAUSE_S = 0.2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class _Pending:
    """A connection that has not introduced itself; `opening` ends when its link is connected."""

    accepted_at: float
    opening: asyncio.Task[None]


class Listener:
    """Accepts connections on one port, at most `max_pending_handshakes` of them not introduced.

    Args:
        make_link: makes the link of a connection that was accepted.
    """

    def __init__(self, make_link: Callable[[], Link], settings: ChannelSettings) -> None:
        self._make_link = make_link
        self._tls = made_tls(settings.tls)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        # Oldest first.
        self._pending: dict[Link, _Pending] = {}
        self._socket: socket.socket | None = None
        self._accepts = False
        self._hurry: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Listener pending {len(self._pending)}>"

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, host: str) -> int:
        """Listen on a free port of `host`, or one of those in the settings; return it.

        Raises:
            PortError: none can be had.
        """
        settings = self._settings
        self._socket = listening_socket(host, settings.port, settings.ports, _BACKLOG)
        self._resume()
        port: int = self._socket.getsockname()[1]
        return port

    def close(self, reason: str) -> None:
        """Accept no more, and close what has not introduced itself, after what was said to it."""
        self._pause()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for link, pending in list(self._pending.items()):
            pending.opening.cancel()
            link.close(reason)

    def forget(self, link: Link) -> None:
        """The connection has introduced itself, or is over: its place is free."""
        self._pending.pop(link, None)
        self._resume()

    def expire(self) -> None:
        """Abort the connections whose time is over; to be called at an interval."""
        limit_s = self._settings.handshake_s * (1.0 if self._accepts else _HURRIED_SHARE)
        latest = self._loop.time() - limit_s
        for link, pending in list(self._pending.items()):
            if pending.accepted_at > latest:
                return
            pending.opening.cancel()
            self.forget(link)
            link.abort("it did not introduce itself")

    # How it works.

    def _resume(self) -> None:
        has_room = len(self._pending) < self._settings.max_pending_handshakes
        if self._socket is not None and has_room and not self._accepts:
            self._accepts = True
            self._loop.add_reader(self._socket, self._accept, self._socket)

    def _pause(self) -> None:
        if self._socket is not None and self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._socket)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection; the loop calls again while there are more, and does all else in between."""
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                logger.error("event=accept_failed reason=%r", error)  # noqa: TRY400 - a trace says no more
                self._pause()
                self._loop.call_later(_NO_DESCRIPTOR_PAUSE_S, self._resume)
            # Otherwise the peer was gone before it was accepted.
            return
        sock.setblocking(False)
        link = self._make_link()
        # In an empty context: Ray Serve cancels what was started in a request's context with the request.
        opening = self._loop.create_task(self._open(link, sock), context=contextvars.Context())
        self._pending[link] = _Pending(self._loop.time(), opening)
        if len(self._pending) >= self._settings.max_pending_handshakes:
            self._pause()
            self._hurry_up()

    def _hurry_up(self) -> None:
        """While no more are accepted, have those go who hold their places in silence."""
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None
        self.expire()
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None and self._socket is not None and not self._accepts:
            due = oldest.accepted_at + self._settings.handshake_s * _HURRIED_SHARE
            self._hurry = self._loop.call_at(due, self._hurry_up)

    async def _open(self, link: Link, sock: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: link, sock)
            else:
                await self._loop.connect_accepted_socket(lambda: link, sock, ssl=self._tls.server)
        except OSError as error:
            self.forget(link)
            link.abort(f"the connection could not be opened: {error}")
            sock.close()
        except asyncio.CancelledError:
            link.abort("the connection was not opened in time")
            sock.close()
            raise
