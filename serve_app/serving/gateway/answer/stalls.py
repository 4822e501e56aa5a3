"""The time limit on every send: a client that reads nothing loses its answer, whoever wrote it.

A server's `send` waits while the client does not read. Such a wait has no end of its own: the engine may have
finished long ago, so no connection to it would notice. One timer looks at all requests of a gateway; a send
itself costs two assignments.
"""

import asyncio

from serve_app.engines.engine import Message, Send
from serve_app.serving.gateway.answer.disconnect import ClientGone


class TimedSend:
    """An ASGI `send` that gives up after a while; made by `StallWatch.watching`.

    Raises:
        ClientGone: the client has read nothing for the time of the watch.
    """

    __slots__ = ("_send", "_stalled", "_task", "_watch", "since")

    def __init__(self, send: Send, watch: "StallWatch") -> None:
        self._send = send
        self._watch = watch
        self._task: asyncio.Task[object] | None = None
        self._stalled = False
        # When the send that is under way began, in ticks of the watch.
        self.since: int | None = None

    async def __call__(self, message: Message) -> None:
        """Send one message."""
        if self._stalled:
            # A comment that was sent beside the request was the one that nobody read.
            raise self._gone()
        self._task, self.since = asyncio.current_task(), self._watch.ticks
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._stalled and self._task is not None and self._task.uncancel() == 0:
                raise self._gone() from None
            raise
        finally:
            self.since = None

    def give_up(self) -> None:
        """End the send that is under way."""
        if self._task is not None and not self._stalled:
            self._stalled = True
            self._task.cancel()

    def _gone(self) -> ClientGone:
        return ClientGone(f"the client has read nothing for {self._watch.timeout_s} s")


class StallWatch:
    """Watches the sends of all requests of one gateway.

    Attributes:
        timeout_s: how long one send may take; kept to within about a third.
        ticks: of the watch's timer, which runs while there is anything to watch.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ticks = 0
        self._tick_s = min(1.0, timeout_s / 3)
        self._watched: set[TimedSend] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watching(self, send: Send) -> TimedSend:
        """Watch a request's sends from now on, until `done`."""
        timed = TimedSend(send, self)
        self._watched.add(timed)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return timed

    def done(self, timed: TimedSend) -> None:
        """The request is over."""
        self._watched.discard(timed)

    def _tick(self) -> None:
        self.ticks += 1
        for timed in tuple(self._watched):
            if timed.since is not None and (self.ticks - timed.since) * self._tick_s > self.timeout_s:
                timed.give_up()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s, self._tick) if self._watched else None
