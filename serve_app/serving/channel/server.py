"""The channel's server in the scheduler: accepts peers and dispatches their messages.

A connection must send `Hello` within `handshake_timeout_s`, in one small frame. `Hello` has a supported
protocol version (`messages`), the secret of its role, which is distributed only through Ray, and the highest
incarnation of the scheduler that the peer has met.

There is one writer at a time, even while two schedulers of a model are alive (a rolling update, a partition).
Each scheduler has an incarnation number, claimed atomically and rising. Peers remember the highest they have
met and reject lower ones. A scheduler that learns of a higher one, from a peer or from the store of claims,
stops for good: it closes every connection, and its supervisor finds it unhealthy. A replica has one
connection, so at most one scheduler reaches it at any time, first the older, then the newer. Grants of the
two never overlap on a replica.

Any host may connect, so a connection counts from the moment it is accepted, before anything is read, and
`handshake_timeout_s` runs from then on. At the limit no more are accepted, and peers wait in the kernel's
backlog. The time for a handshake is then shorter, so that clients that send nothing cannot block peers. No
connection is closed earlier than that, because in a crowd of real peers the oldest are those about to send
`Hello`.
"""

import asyncio
import contextvars
import errno
import hmac
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app.errors import ChannelError
from serve_app.request import PriorityClass
from serve_app.serving.channel.gateway_sessions import GatewaySessions, ReplicaRegistry
from serve_app.serving.channel.link import Link, decode_from_peer
from serve_app.serving.channel.messages import (
    OLDEST_VERSION,
    VERSION,
    Bye,
    Hello,
    PeerRejected,
    Role,
    Welcome,
)
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.listening import listening_socket
from serve_app.serving.tls import make_tls

logger = logging.getLogger("ray.serve")

# Listen backlog; the kernel may allow less (net.core.somaxconn).
_BACKLOG = 4096
# Share of `handshake_timeout_s` while others wait: 0.25 s, when a peer needs some milliseconds.
_CROWDED_SHARE = 0.25
# Without file descriptors, each attempt fails at once, so retry after a pause.
_NO_DESCRIPTOR_PAUSE_S = 0.2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class _Pending:
    """An accepted connection before `Hello`; `opening` ends when its link is connected."""

    accepted_at: float
    opening: asyncio.Task[None]


class Listener:
    """Acceptor of connections on one port, with at most `max_pending_handshakes` before their `Hello`."""

    def __init__(self, make_link: Callable[[], Link], settings: ChannelSettings) -> None:
        self._make_link = make_link
        self._tls = make_tls(settings.tls)
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
        """Listen on `host`, on a free port or one of the configured ones; return the port.

        Raises:
            PortError: no port is available.
        """
        settings = self._settings
        self._socket = listening_socket(host, settings.port, settings.ports, _BACKLOG)
        self._resume()
        port: int = self._socket.getsockname()[1]
        return port

    def close(self, reason: str) -> None:
        """Stop accepting, and close pending connections after their pending messages."""
        self._pause()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for link, pending in list(self._pending.items()):
            pending.opening.cancel()
            link.close(reason)

    def release(self, link: Link) -> None:
        """Remove a connection that completed its handshake or ended, which frees its slot."""
        self._pending.pop(link, None)
        self._resume()

    def expire(self) -> None:
        """Abort the connections whose handshake timed out; must be called periodically."""
        limit_s = self._settings.handshake_timeout_s * (1.0 if self._accepts else _CROWDED_SHARE)
        latest = self._loop.time() - limit_s
        for link, pending in list(self._pending.items()):
            if pending.accepted_at > latest:
                return
            pending.opening.cancel()
            self.release(link)
            link.abort("no Hello in time")

    # Internals.

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
        """Accept one connection; the loop calls again while there are more, with other work in between."""
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                logger.error("event=accept_failed reason=%r", error)  # noqa: TRY400 - a trace says no more
                self._pause()
                self._loop.call_later(_NO_DESCRIPTOR_PAUSE_S, self._resume)
            # Otherwise the peer disconnected before it was accepted.
            return
        sock.setblocking(False)
        link = self._make_link()
        # In an empty context, because Ray Serve cancels a request's tasks with the request.
        opening = self._loop.create_task(self._open(link, sock), context=contextvars.Context())
        self._pending[link] = _Pending(self._loop.time(), opening)
        if len(self._pending) >= self._settings.max_pending_handshakes:
            self._pause()
            self._expire_early()

    def _expire_early(self) -> None:
        """Expire connections without a handshake sooner while no more are accepted."""
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None
        self.expire()
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None and self._socket is not None and not self._accepts:
            due = oldest.accepted_at + self._settings.handshake_timeout_s * _CROWDED_SHARE
            self._hurry = self._loop.call_at(due, self._expire_early)

    async def _open(self, link: Link, sock: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: link, sock)
            else:
                await self._loop.connect_accepted_socket(lambda: link, sock, ssl=self._tls.server)
        except OSError as error:
            self.release(link)
            link.abort(f"the connection could not be opened: {error}")
            sock.close()
        except asyncio.CancelledError:
            link.abort("the connection was not opened in time")
            sock.close()
            raise


# A `Hello` has five short fields; unauthenticated peers need no larger buffer.
_HELLO_FRAME_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The scheduler's incarnation, and the secrets by role, so that a replica cannot pose as a gateway."""

    secrets: Mapping[Role, str]
    incarnation: int
    queue_timeouts_s: dict[PriorityClass, float]


@dataclass(slots=True, eq=False)
class _Peer:
    role: Role
    peer_id: str
    on_message: Callable[[Any], None]


class ChannelServer:
    """Server that accepts peers and passes their messages to the sessions or the registry."""

    def __init__(
        self,
        identity: Identity,
        settings: ChannelSettings,
        gateways: GatewaySessions,
        replicas: ReplicaRegistry,
        on_superseded: Callable[[int], None],
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._gateways = gateways
        self._replicas = replicas
        self._on_superseded = on_superseded
        self._loop = asyncio.get_running_loop()
        # Holds connections before their `Hello`.
        self._listener = Listener(self._make_link, settings)
        self._peers: dict[Link, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ChannelServer peers {len(self._peers)}, pending {len(self._listener)}>"

    async def start(self, host: str) -> int:
        """Listen on `host`, and return the port."""
        port = self._listener.start(host)
        self._timer = self._loop.call_later(self._settings.heartbeat_interval_s, self._tick)
        return port

    def stop(self, reason: str) -> None:
        """Stop accepting, and close every connection after its pending messages."""
        self._listener.close(reason)
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._peers):
            link.close(reason)

    def on_link_message(self, link: Link, message: Any) -> None:
        """Handle a message, which must be `Hello` on a new connection."""
        peer = self._peers.get(link)
        if peer is None:
            self._handshake(link, message)
        elif isinstance(message, Bye):
            self._remove(link, "the peer sent Bye", permanent=True)
            link.close("the peer sent Bye")
        else:
            peer.on_message(message)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """Handle the end of a connection."""
        self._listener.release(link)
        self._remove(link, reason, permanent=False)

    def _remove(self, link: Link, reason: str, *, permanent: bool) -> None:
        peer = self._peers.pop(link, None)
        if peer is None:
            return
        logger.info("event=peer_lost role=%s peer=%s reason=%r", peer.role.value, peer.peer_id, reason)
        if peer.role is Role.GATEWAY:
            self._gateways.on_loss(peer.peer_id, link, permanent=permanent)
        else:
            self._replicas.on_loss(peer.peer_id, link)

    def _make_link(self) -> Link:
        link = Link(self, decode_from_peer, self._settings, tolerates_busy_peer=True)
        link.limit_frames(_HELLO_FRAME_BYTES)
        return link

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._settings.heartbeat_interval_s, self._tick)
        for link in list(self._peers):
            link.tick()
        self._listener.expire()

    def _handshake(self, link: Link, message: Any) -> None:
        denial = self._objection(message)
        if denial:
            logger.warning("event=peer_rejected reason=%r", denial)
            link.send(PeerRejected(denial))
            link.close(denial)
            return
        self._listener.release(link)
        link.limit_frames(self._settings.max_frame_bytes)
        link.version = message.version
        self._replace_older(message)
        logger.info(
            "event=peer_joined role=%s peer=%s version=%d",
            message.role.value,
            message.peer_id,
            message.version,
        )
        link.send(Welcome(self._identity.incarnation, self._identity.queue_timeouts_s))
        on_message: Callable[[Any], None] = partial(self._replicas.on_message, message.peer_id, link)
        if message.role is Role.GATEWAY:
            link.send(self._replicas.table)
            on_message = self._gateways.on_join(message.peer_id, link)
        self._peers[link] = _Peer(message.role, message.peer_id, on_message)

    def _objection(self, message: Any) -> str:
        """Return why this peer is rejected; empty if it is accepted."""
        if not isinstance(message, Hello):
            raise ChannelError(f"expected Hello on a new connection, got {type(message).__name__}")
        identity = self._identity
        if not hmac.compare_digest(message.secret.encode(), identity.secrets[message.role].encode()):
            return "wrong secret: look up the endpoint again"
        if not OLDEST_VERSION <= message.version <= VERSION:
            return (
                f"the peer uses protocol version {message.version}, this scheduler supports {OLDEST_VERSION} "
                f"to {VERSION}: upgrade by one version at a time"
            )
        if message.highest_incarnation > identity.incarnation:
            # After the check of the secret, so that no unauthenticated peer can supersede a scheduler.
            self._loop.call_soon(self._on_superseded, message.highest_incarnation)
            return f"incarnation {identity.incarnation} is superseded by {message.highest_incarnation}"
        if not message.peer_id:
            return "the peer has no name"
        return ""

    def _replace_older(self, hello: Hello) -> None:
        """Abort an earlier connection of the same peer."""
        for link, peer in list(self._peers.items()):
            if peer.role is hello.role and peer.peer_id == hello.peer_id:
                link.abort("the peer has opened another connection")
