"""The channel's server in the scheduler: admits peers and hands their messages on.

A connection must introduce itself within `handshake_s`, in one small frame, with a version of the protocol
that is spoken here (`messages`), the secret of its role, which Ray alone hands out, and the highest
incarnation of the scheduler that the peer has met.

One writer at a time, even while two schedulers of a model are alive (a rolling update, a partition): each
scheduler has an incarnation number, claimed atomically and rising. Peers remember the highest they have
met and refuse a lower one. A scheduler that hears of a higher one, from a peer or from the store of claims,
stops for ever: it closes every connection, and whoever supervises it finds it unhealthy. A replica
has one connection, so at any moment at most one scheduler can reach it: the older until it stops, then the
newer; grants of the two never overlap on one replica.

Anybody on the network may connect, so a connection is counted from the moment that it is accepted, before
anything is read from it, and it has `handshake_s` to introduce itself, from then on. At the limit no more are
accepted: peers wait in the kernel's queue until a place is free. Meanwhile the time for an introduction is
shorter, so that strangers who hold their places in silence do not keep peers out. Nobody is sent away before
that time, because the oldest of a crowd of real peers are those who are just about to speak.
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
from serve_app.serving.channel.gateway_sessions import GatewaySessions
from serve_app.serving.channel.link import Link, decode_from_peer
from serve_app.serving.channel.messages import OLDEST_VERSION, VERSION, Bye, Hello, Rejected, Role, Welcome
from serve_app.serving.channel.replica_registry import ReplicaRegistry
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


# A Hello has five short fields; a stranger is given no more memory than that needs.
_STRANGERS_FRAME_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a scheduler shows, and asks for, at the door.

    Attributes:
        secrets: of each role, so that a replica cannot pose as a gateway.
    """

    secrets: Mapping[Role, str]
    incarnation: int
    queue_timeouts_s: dict[PriorityClass, float]


@dataclass(slots=True, eq=False)
class _Peer:
    role: Role
    peer_id: str
    on_message: Callable[[Any], None]


class ChannelServer:
    """Accepts peers, and passes what they say to the registry of their kind."""

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
        # Holds those who have not introduced themselves.
        self._listener = Listener(self._make_link, settings)
        self._peers: dict[Link, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ChannelServer peers {len(self._peers)}, strangers {len(self._listener)}>"

    async def start(self, host: str) -> int:
        """Listen on a free port of `host` and return it."""
        port = self._listener.start(host)
        self._timer = self._loop.call_later(self._settings.heartbeat_s, self._tick)
        return port

    def stop(self, reason: str) -> None:
        """Let nobody in any more and close every connection, after what was said already."""
        self._listener.close(reason)
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._peers):
            link.close(reason)

    def on_link_message(self, link: Link, message: Any) -> None:
        """Take a message of a stranger or a peer."""
        peer = self._peers.get(link)
        if peer is None:
            self._meet(link, message)
        elif isinstance(message, Bye):
            self._part(link, "it said goodbye", for_good=True)
            link.close("it said goodbye")
        else:
            peer.on_message(message)

    def on_link_lost(self, link: Link, reason: str) -> None:
        """A connection is over."""
        self._listener.forget(link)
        self._part(link, reason, for_good=False)

    def _part(self, link: Link, reason: str, *, for_good: bool) -> None:
        peer = self._peers.pop(link, None)
        if peer is None:
            return
        logger.info("event=peer_lost role=%s peer=%s reason=%r", peer.role.value, peer.peer_id, reason)
        if peer.role is Role.GATEWAY:
            self._gateways.on_loss(peer.peer_id, link, for_good=for_good)
        else:
            self._replicas.on_loss(peer.peer_id, link)

    def _make_link(self) -> Link:
        link = Link(self, decode_from_peer, self._settings, bears_busy_peer=True)
        link.limit_frames(_STRANGERS_FRAME_BYTES)
        return link

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._settings.heartbeat_s, self._tick)
        for link in list(self._peers):
            link.tick()
        self._listener.expire()

    def _meet(self, link: Link, message: Any) -> None:
        denial = self._objection(message)
        if denial:
            logger.warning("event=peer_rejected reason=%r", denial)
            link.send(Rejected(denial))
            link.close(denial)
            return
        self._listener.forget(link)
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
        """Return why this peer is not let in, nothing if it is."""
        if not isinstance(message, Hello):
            raise ChannelError(f"a stranger must say Hello first, not {type(message).__name__}")
        identity = self._identity
        if not hmac.compare_digest(message.secret.encode(), identity.secrets[message.role].encode()):
            return "the secret is wrong: ask for the endpoint again"
        if not OLDEST_VERSION <= message.version <= VERSION:
            return (
                f"the peer speaks version {message.version} of the protocol, this scheduler {OLDEST_VERSION} "
                f"to {VERSION}: upgrade by one version at a time"
            )
        if message.highest_incarnation > identity.incarnation:
            # Only after the secret: a stranger must not be able to put a scheduler out of office.
            self._loop.call_soon(self._on_superseded, message.highest_incarnation)
            return f"incarnation {identity.incarnation} is superseded by {message.highest_incarnation}"
        if not message.peer_id:
            return "the peer has no name"
        return ""

    def _replace_older(self, hello: Hello) -> None:
        """A peer has one connection; the one it opened last counts."""
        for link, peer in list(self._peers.items()):
            if peer.role is hello.role and peer.peer_id == hello.peer_id:
                link.abort("the peer has opened another connection")
