"""Messages in a stream whose request is queued: keep-alive comments and queue updates.

Server-sent events allow comments, lines that begin with a colon, which clients ignore. The first one starts
the answer: its status is 200, and its headers cannot describe the dispatch, which is not known yet. It is
therefore sent only after an interval in which most requests are dispatched or rejected.

Queue updates are for clients that subscribe with `x-ewsjf-queue`. The first one follows after a short delay,
so that requests that are dispatched or rejected at once have their own status and headers, at no cost. The
scheduler decides when there is news. While it is disconnected, the client is notified of that instead.
"""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.engines.engine import Send
from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.gateway.answer.responses import HeaderList, encode

_COMMENT = b": queued\n\n"
_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class QueuedComments:
    """Comments of one stream.

    Args:
        interval_s: time before the first, and silence between them; 0 disables them.
        headers: headers of the answer, besides its type.

    Attributes:
        begun: a comment was sent, so the answer has begun.
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
        """Start the timer of the first comment."""
        self._arm()

    def on_grant(self) -> None:
        """Handle a grant. Comments continue until the answer begins."""

    async def stop(self) -> None:
        """Stop sending, and wait for a comment in progress."""
        self.cancel()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def cancel(self) -> None:
        """Start no further comments."""
        self._stopped, self._next = True, None
        if self._timer is not None:
            self._timer.cancel()

    def send_piece(self, piece: bytes) -> None:
        """Send a comment or an event; while one is in progress, only the newest is queued."""
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
        if not self.begun:
            self.begun = True
            headers = [*_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while following is not None:
            await self._send({"type": "http.response.body", "body": following, "more_body": True})
            following, self._next = self._next, None
        self._sending = None
        if not self._stopped:
            self._arm()

    def _arm(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.send_piece, _COMMENT)


SUBSCRIBE_AFTER_S = 0.25
"""Delay of the subscription; most requests are dispatched or rejected by then."""


class QueueForm(enum.StrEnum):
    """Format of queue updates."""

    COMMENTS = "comments"
    """Comments, which all clients of server-sent events ignore."""
    EVENTS = "events"
    """Events named `ewsjf.queue`, for clients that support them."""


@dataclass(frozen=True, slots=True)
class QueueSubscription:
    """Format of a stream's queue updates, and `subscribe`, which subscribes a callback at the scheduler."""

    form: QueueForm
    subscribe: Callable[[Callable[[RequestOutlook | None], None]], None]


class QueueUpdates(QueuedComments):
    """Queue updates of one stream, with comments during longer silence."""

    __slots__ = ("_subscribing", "_subscription")

    def __init__(
        self, send: Send, interval_s: float, headers: HeaderList, subscription: QueueSubscription
    ) -> None:
        super().__init__(send, interval_s, headers)
        self._subscription = subscription
        self._subscribing: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timers of the first comment and of the subscription."""
        super().start()
        self._subscribing = asyncio.get_running_loop().call_later(
            SUBSCRIBE_AFTER_S, self._subscription.subscribe, self._on_outlook
        )

    def on_grant(self) -> None:
        """Send `started` if the client was notified of waiting."""
        if self.begun:
            self.send_piece(_written(self._subscription.form, "started", None))

    def cancel(self) -> None:
        """Start no further messages, and cancel a pending subscription."""
        super().cancel()
        if self._subscribing is not None:
            self._subscribing.cancel()

    def _on_outlook(self, outlook: RequestOutlook | None) -> None:
        state = "scheduler_unavailable" if outlook is None else "waiting"
        self.send_piece(_written(self._subscription.form, state, outlook))


def _written(form: QueueForm, state: str, outlook: RequestOutlook | None) -> bytes:
    fields: dict[str, object] = {"state": state}
    if outlook is not None:
        fields["position"] = outlook.position
        if outlook.expected_s is not None:
            fields["expected_start_s"] = outlook.expected_s
            fields["earliest_s"], fields["latest_s"] = outlook.earliest_s, outlook.latest_s
    if form is QueueForm.EVENTS:
        return b"event: ewsjf.queue\ndata: " + encode(fields) + b"\n\n"
    return (
        b": queue "
        + b" ".join(b"%s=%s" % (key.encode(), str(fields[key]).encode()) for key in fields)
        + b"\n\n"
    )
