"""The connector of a peer: finds the scheduler, introduces itself, and begins again when the connection ends.

The scheduler is looked for anew before each try, because the next one may be elsewhere and has another
secret. Pauses between tries grow and are spread by chance, so that a fleet of peers does not knock all at
once; a connection that held for a while makes the next search begin at once.
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
    Rejected,
    Role,
    SchedulerEndpoint,
    Welcome,
    common_version,
)
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.tls import connect, made_tls

logger = logging.getLogger("ray.serve")

# Searches in a row get more and more time: on a starved machine each takes longer than the first limit, which
# is for calls that went to a dead scheduler and never return.
_MOST_DOUBLINGS = 3

Locate = Callable[[], Awaitable[SchedulerEndpoint]]
# Before a lost scheduler is looked for again; it doubles up to `backoff_max_s`.
_FIRST_PAUSE_S = 0.05


class Resident(Protocol):
    """What lives behind a connector. All methods are called on the event loop and must not block."""

    def on_connected(self, link: Link, welcome: Welcome) -> None:
        """A scheduler has let us in; what it must know first is to be sent now."""
        ...

    def on_message(self, message: Any) -> None:
        """The scheduler said something; `ChannelError` ends the connection."""
        ...

    def on_disconnected(self) -> None:
        """The connection to the scheduler is lost."""
        ...

    def on_heartbeat(self) -> None:
        """Every `heartbeat_s`, connected or not."""
        ...


class Connector:
    """Keeps one connection to whoever schedules now.

    Attributes:
        highest_incarnation: of all schedulers met; a lower one is refused.
    """

    def __init__(
        self, role: Role, peer_id: str, locate: Locate, settings: ChannelSettings, resident: Resident
    ) -> None:
        self._role = role
        self._peer_id = peer_id
        self._locate = locate
        self._settings = settings
        self._resident = resident
        self._tls = made_tls(settings.tls)
        # Chance spreads the knocks of a fleet; nothing else depends on it.
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
        """Whether a scheduler has let us in, and the connection holds."""
        return self._up

    def start(self) -> None:
        """Begin to look for the scheduler, in the background.

        In an empty context: Ray Serve cancels what was started in the context of a request with that request.
        """
        context = contextvars.Context()
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), context=context)
        context.run(self._tick)

    async def close(self) -> None:
        """Say goodbye and stop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None and self._up:
            self._link.send(Bye())
            self._link.close("we said goodbye")
            self._up = False
            self._resident.on_disconnected()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # What the link calls.

    def on_link_message(self, link: Link, message: Any) -> None:
        """Take a message of the current connection."""
        if link is not self._link:
            return
        if self._up:
            self._resident.on_message(message)
        elif isinstance(message, Welcome):
            self._let_in(link, message)
        elif isinstance(message, Rejected):
            raise ChannelError(f"the scheduler rejects {self._role.value} {self._peer_id}: {message.reason}")
        else:
            raise ChannelError(f"a scheduler must say Welcome first, not {type(message).__name__}")

    def on_link_lost(self, link: Link, reason: str) -> None:
        """A connection is over."""
        if link is not self._link:
            return
        self._link = None
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(ChannelError(reason))
        if self._up:
            self._up = False
            logger.warning("event=scheduler_lost peer=%s reason=%r", self._peer_id, reason)
            self._resident.on_disconnected()
        self._lost.set()

    # How it works.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s, tries = _FIRST_PAUSE_S, 0
        while True:
            began = loop.time()
            try:
                await self._connect(self._settings.locate_s * 2 ** min(tries, _MOST_DOUBLINGS))
                tries = 0
                await self._lost.wait()
            except Exception as error:  # noqa: BLE001 - whatever Ray or the network says, we try again
                tries += 1
                # Powers of two, so that a long outage is told in a few lines.
                if tries & (tries - 1) == 0:
                    logger.warning(
                        "event=scheduler_unreachable peer=%s tries=%d reason=%r", self._peer_id, tries, error
                    )
            if loop.time() - began > self._settings.backoff_max_s and tries == 0:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._settings.backoff_max_s)

    async def _connect(self, locate_s: float) -> None:
        """Find the scheduler within so many seconds, and be let in."""
        # Not `wait_for`, which drops a cancellation that comes with the answer (Python 3.11): `close` would
        # wait for ever.
        async with asyncio.timeout(locate_s):
            endpoint = await self._locate()
        self._refuse_older(endpoint.incarnation)
        version = common_version(endpoint.version)
        loop = asyncio.get_running_loop()
        self._lost.clear()
        self._welcome = loop.create_future()
        async with asyncio.timeout(self._settings.handshake_s):
            _, link = await connect(
                lambda: Link(self, decode_from_scheduler, self._settings),
                endpoint.host,
                endpoint.port,
                None if self._tls is None else self._tls.as_client,
            )
            self._link = link
            try:
                self._introduce(link, endpoint.secret, version)
                await self._welcome
            except BaseException:
                # Even if the welcome came in the same instant: `link_lost` undoes it.
                link.abort("the handshake failed")
                raise

    def _introduce(self, link: Link, secret: str, version: int) -> None:
        if not link.open:
            raise ChannelError("the scheduler closed the connection at once")
        link.version = version
        link.send(Hello(version, self._role, self._peer_id, secret, self.highest_incarnation))

    def _let_in(self, link: Link, welcome: Welcome) -> None:
        """Answer a welcome in the same breath, so that nothing can come between it and our first words."""
        assert self._welcome is not None, "a link exists only after _connect has made the future"
        self._refuse_older(welcome.incarnation)
        self.highest_incarnation = welcome.incarnation
        self._up = True
        logger.info("event=scheduler_found peer=%s incarnation=%d", self._peer_id, welcome.incarnation)
        self._resident.on_connected(link, welcome)
        if not self._welcome.done():
            self._welcome.set_result(welcome)

    def _refuse_older(self, incarnation: int) -> None:
        if incarnation < self.highest_incarnation:
            raise ChannelError(
                f"incarnation {incarnation} of the scheduler is superseded by {self.highest_incarnation}"
            )

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._settings.heartbeat_s, self._tick)
        if self._link is not None and self._up:
            self._link.tick()
        self._resident.on_heartbeat()
