"""Messages in a stream whose request waits: comments that keep the connection alive, and queue updates.

Server-sent events have comments, lines that begin with a colon, which every client ignores. With the first
one the answer has begun: its status is 200 and its headers tell nothing of the dispatch, which is not known
yet. So the first comes only after an interval in which most requests are dispatched or refused.

Queue updates for clients that ask with `x-ewsjf-queue`.

Its first update comes a moment after it began to wait, so requests that are dispatched or refused at once
keep the status and headers of their answer, and cost nothing. The scheduler decides when there is news.
Nothing is said twice: while no scheduler is there, that is said instead of what the last one expected.
"""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.engines.engine import Send
from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.gateway.answer.client import ClientGone
from serve_app.serving.gateway.answer.responses import HeaderList, encode

_COMMENT = b": queued\n\n"
_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class QueuedComments:
    """The comments of one stream.

    Args:
        interval_s: until the first, and between them, of silence; 0 for none.
        headers: of the answer, besides its type.

    Attributes:
        begun: one has been sent, so the answer has begun.
    """

    __slots__ = ("_headers", "_interval_s", "_next", "_send", "_sending", "_stopped", "_timer", "begun")

    def __init__(self, send: Send, interval_s: float, headers: HeaderList) -> None:
        self._send = send
        self._interval_s = interval_s
        self._headers = headers
        self._sending: asyncio.Task[None] | None = None
        self._next: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.begun = False

    def start(self) -> None:
        """Begin to count the time."""
        self._arm()

    def on_grant(self) -> None:
        """The request waits no more, for now; comments go on until its answer begins."""

    async def stop(self) -> None:
        """Send no more; returns when none is under way."""
        self.cancel()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def cancel(self) -> None:
        """Begin no more."""
        self._stopped, self._next = True, None
        if self._timer is not None:
            self._timer.cancel()

    def say(self, piece: bytes) -> None:
        """Send a comment or an event; while the one before is on its way, only the newest is kept."""
        if self._stopped:
            return
        if self._sending is not None:
            self._next = piece
            return
        if self._timer is not None:
            self._timer.cancel()
        self._sending = asyncio.get_running_loop().create_task(self._write(piece))

    async def _write(self, piece: bytes) -> None:
        following: bytes | None = piece
        try:
            if not self.begun:
                self.begun = True
                headers = [*_HEADERS, *self._headers]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            while following is not None:
                await self._send({"type": "http.response.body", "body": following, "more_body": True})
                following, self._next = self._next, None
        except (OSError, ClientGone):
            # The client has gone; its request's watch hears of it.
            return
        self._sending = None
        if not self._stopped:
            self._arm()

    def _arm(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.say, _COMMENT)


ASK_AFTER_S = 0.25
"""Most requests are dispatched or refused by then."""


class QueueForm(enum.StrEnum):
    """How a client wants to be told."""

    COMMENTS = "comments"
    """Comments, which every client of server-sent events ignores."""
    EVENTS = "events"
    """Events named `ewsjf.queue`, for clients that know them."""


@dataclass(frozen=True, slots=True)
class Telling:
    """What a client is told, and by whom.

    Attributes:
        ask: has the scheduler tell from now on.
    """

    form: QueueForm
    ask: Callable[[Callable[[RequestOutlook | None], None]], None]


class QueueUpdates(QueuedComments):
    """The updates of one stream, and comments where it would be silent for too long."""

    __slots__ = ("_asking", "_telling")

    def __init__(self, send: Send, interval_s: float, headers: HeaderList, telling: Telling) -> None:
        super().__init__(send, interval_s, headers)
        self._telling = telling
        self._asking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to count the time until the first update."""
        super().start()
        self._asking = asyncio.get_running_loop().call_later(ASK_AFTER_S, self._telling.ask, self._on_outlook)

    def on_grant(self) -> None:
        """The request waits no more: whoever was told that it does is told that, too."""
        if self.begun:
            self.say(_written(self._telling.form, "started", None))

    def cancel(self) -> None:
        """Begin no more, and ask no more."""
        super().cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _on_outlook(self, outlook: RequestOutlook | None) -> None:
        state = "scheduler_away" if outlook is None else "waiting"
        self.say(_written(self._telling.form, state, outlook))


def _written(form: QueueForm, state: str, outlook: RequestOutlook | None) -> bytes:
    told: dict[str, object] = {"state": state}
    if outlook is not None:
        told["position"] = outlook.position
        if outlook.expected_s is not None:
            told["expected_start_s"] = outlook.expected_s
            told["earliest_s"], told["latest_s"] = outlook.earliest_s, outlook.latest_s
    if form is QueueForm.EVENTS:
        return b"event: ewsjf.queue\ndata: " + encode(told) + b"\n\n"
    return (
        b": queue " + b" ".join(b"%s=%s" % (key.encode(), str(told[key]).encode()) for key in told) + b"\n\n"
    )
