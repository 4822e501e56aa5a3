"""Connector of a peer: finds the scheduler, performs the handshake, and reconnects when the connection ends.

The scheduler is located before each attempt, because its successor has another address and secret. Pauses
between attempts grow and have jitter, so that a fleet of peers does not reconnect at once. After a connection
that lasted for a while, the next search begins immediately.
"""

import asyncio
import contextvars
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from serve_app.errors import ChannelError
from serve_app.serving.channel.link import Link, decode_from_scheduler
from serve_app.serving.channel.messages import (
    Bye,
    Hello,
    PeerRejected,
    Role,
    SchedulerEndpoint,
    Welcome,
    common_version,
)
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.tls import connect, make_tls

logger = logging.getLogger("ray.serve")

# The time limit of a search doubles with each failure, because on a starved machine each one may need longer.
# The first limit is for calls to a dead scheduler, which never return.
_MAX_DOUBLINGS = 3

Locate = Callable[[], Awaitable[SchedulerEndpoint]]
# Pause before the first reconnect; doubles up to `backoff_max_s`.
_FIRST_PAUSE_S = 0.05


class PeerHandler(Protocol):
    """Handler behind a connector. All methods are called on the event loop and must not block."""

    def on_connected(self, link: Link, welcome: Welcome) -> None:
        """Handle a completed handshake; messages that the scheduler needs first are sent here."""
        ...

    def on_message(self, message: Any) -> None:
        """Handle a message of the scheduler; `ChannelError` ends the connection."""
        ...

    def on_disconnected(self) -> None:
        """Handle the loss of the connection."""
        ...

    def on_heartbeat(self) -> None:
        """Run every `heartbeat_interval_s`, connected or not."""
        ...


class Connector:
    """Connection to the model's current scheduler; lower incarnations than the highest met are rejected."""

    def __init__(
        self, role: Role, peer_id: str, locate: Locate, settings: ChannelSettings, handler: PeerHandler
    ) -> None:
        self._role = role
        self._peer_id = peer_id
        self._locate = locate
        self._settings = settings
        self._handler = handler
        self._tls = make_tls(settings.tls)
        # Jitter for reconnects; nothing else depends on it.
        self._rng = random.Random(peer_id)  # noqa: S311 - not for secrets
        self._link: Link | None = None
        self._welcome: asyncio.Future[Welcome] | None = None
        self._lost: asyncio.Event = asyncio.Event()
        self._up = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.highest_incarnation = 0

    def __repr__(self) -> str:
        state = "up" if self._up else "down"
        return (
            f"<Connector {self._role.value} {self._peer_id} {state}, incarnation {self.highest_incarnation}>"
        )

    @property
    def is_up(self) -> bool:
        """True if the handshake is complete and the connection is open."""
        return self._up

    def start(self) -> None:
        """Start connecting in the background.

        The task runs in an empty context, because Ray Serve cancels the tasks of a request's context with it.
        """
        context = contextvars.Context()
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), context=context)
        context.run(self._tick)

    async def close(self) -> None:
        """Send `Bye` and stop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None and self._up:
            self._link.send(Bye())
            self._link.close("Bye was sent")
            self._up = False
            self._handler.on_disconnected()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # Called by the link.

    def on_link_message(self, link: Link, message: Any) -> None:
        """Handle a message of the current connection."""
        if link is not self._link:
            return
        if self._up:
            self._handler.on_message(message)
        elif isinstance(message, Welcome):
            self._on_welcome(link, message)
        elif isinstance(message, PeerRejected):
            raise ChannelError(f"the scheduler rejects {self._role.value} {self._peer_id}: {message.reason}")
        else:
            raise ChannelError(f"expected Welcome from the scheduler, got {type(message).__name__}")

    def on_link_lost(self, link: Link, reason: str) -> None:
        """Handle the end of a connection."""
        if link is not self._link:
            return
        self._link = None
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(ChannelError(reason))
        if self._up:
            self._up = False
            logger.warning("event=scheduler_lost peer=%s reason=%r", self._peer_id, reason)
            self._handler.on_disconnected()
        self._lost.set()

    # Internals.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s, tries = _FIRST_PAUSE_S, 0
        while True:
            began = loop.time()
            try:
                await self._connect(self._settings.locate_timeout_s * 2 ** min(tries, _MAX_DOUBLINGS))
                tries = 0
                await self._lost.wait()
            except Exception as error:  # noqa: BLE001 - retry on any error of Ray or the network
                tries += 1
                # Log at powers of two only, so that a long outage takes few lines.
                if tries & (tries - 1) == 0:
                    logger.warning(
                        "event=scheduler_unreachable peer=%s tries=%d reason=%r", self._peer_id, tries, error
                    )
            if loop.time() - began > self._settings.backoff_max_s and tries == 0:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._settings.backoff_max_s)

    async def _connect(self, locate_timeout_s: float) -> None:
        """Locate the scheduler within `locate_timeout_s` seconds, and perform the handshake."""
        # Not `wait_for`, which may drop a cancellation (Python 3.11), so that `close` would hang.
        async with asyncio.timeout(locate_timeout_s):
            endpoint = await self._locate()
        self._reject_older(endpoint.incarnation)
        version = common_version(endpoint.version)
        loop = asyncio.get_running_loop()
        self._lost.clear()
        self._welcome = loop.create_future()
        async with asyncio.timeout(self._settings.handshake_timeout_s):
            _, link = await connect(
                lambda: Link(self, decode_from_scheduler, self._settings),
                endpoint.host,
                endpoint.port,
                None if self._tls is None else self._tls.as_client,
            )
            self._link = link
            try:
                self._send_hello(link, endpoint.secret, version)
                await self._welcome
            except BaseException:
                # Even if the welcome arrived at the same time: `on_link_lost` undoes it.
                link.abort("the handshake failed")
                raise

    def _send_hello(self, link: Link, secret: str, version: int) -> None:
        if not link.open:
            raise ChannelError("the scheduler closed the connection immediately")
        link.version = version
        link.send(Hello(version, self._role, self._peer_id, secret, self.highest_incarnation))

    def _on_welcome(self, link: Link, welcome: Welcome) -> None:
        """Handle a welcome synchronously, so that no message precedes the handler's first ones."""
        assert self._welcome is not None, "a link exists only after _connect has made the future"
        self._reject_older(welcome.incarnation)
        self.highest_incarnation = welcome.incarnation
        self._up = True
        logger.info("event=scheduler_found peer=%s incarnation=%d", self._peer_id, welcome.incarnation)
        self._handler.on_connected(link, welcome)
        if not self._welcome.done():
            self._welcome.set_result(welcome)

    def _reject_older(self, incarnation: int) -> None:
        if incarnation < self.highest_incarnation:
            raise ChannelError(
                f"incarnation {incarnation} of the scheduler is superseded by {self.highest_incarnation}"
            )

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._settings.heartbeat_interval_s, self._tick)
        if self._link is not None and self._up:
            self._link.tick()
        self._handler.on_heartbeat()
