"""Comments in a stream that waits, so that no proxy between client and gateway cuts a silent connection.

Server-sent events have comments, lines that begin with a colon, which every client ignores. With the first
one the answer has begun: its status is 200 and its headers tell nothing of the dispatch, which is not known
yet. So the first comes only after an interval in which most requests are dispatched or refused.
"""

import asyncio

from serve_app.engines.engine import Send
from serve_app.serving.gateway.answer.disconnect import ClientGone
from serve_app.serving.gateway.answer.responses import HeaderList

_COMMENT = b": queued\n\n"
_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class QueuedComments:
    """The comments of one stream.

    Args:
        interval_s: until the first, and between them.
        headers: of the answer, besides its type.

    Attributes:
        begun: one has been sent, so the answer has begun.
    """

    __slots__ = ("_headers", "_interval_s", "_send", "_sending", "_timer", "begun")

    def __init__(self, send: Send, interval_s: float, headers: HeaderList) -> None:
        self._send = send
        self._interval_s = interval_s
        self._headers = headers
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.begun = False

    def start(self) -> None:
        """Begin to count the time."""
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._comment)

    async def stop(self) -> None:
        """Send no more; returns when none is under way."""
        self.cancel()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def cancel(self) -> None:
        """Begin no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _comment(self) -> None:
        self._sending = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            if not self.begun:
                self.begun = True
                headers = [*_HEADERS, *self._headers]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        except (OSError, ClientGone):
            # The client has gone; its request's watch hears of it.
            return
        if self._timer is not None:
            self.start()
