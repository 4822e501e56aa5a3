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

from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.gateway.answer.responses import ClientExchange, encode
from serve_app.serving.gateway.upstream.connection import HeaderList

_COMMENT = b": queued\n\n"
_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class QueuedComments:
    """Comments of one stream. Those that a client does not read are replaced by the newest one.

    Args:
        interval_s: time before the first, and silence between them; 0 disables them.
        lines: header lines of the answer, besides its type.

    Attributes:
        begun: a comment was sent, so the answer has begun.
    """

    __slots__ = ("_exchange", "_interval_s", "_lines", "_next", "_stopped", "_timer", "begun")

    def __init__(self, exchange: ClientExchange, interval_s: float, lines: bytes) -> None:
        self._exchange = exchange
        self._interval_s = interval_s
        self._lines = lines
        self._next: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.begun = False

    def start(self) -> None:
        """Start the timer of the first comment."""
        self._arm()

    def on_grant(self) -> None:
        """Handle a grant. Comments continue until the answer begins."""

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Handle an outlook. Comments do not state it."""

    def stop(self) -> None:
        """Send no further messages. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next is not None:
            self._next = self._exchange.on_writable = None

    def send_piece(self, piece: bytes) -> None:
        """Send a comment or an event, as soon as the client reads."""
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        exchange = self._exchange
        if exchange.is_choked:
            self._next, exchange.on_writable = piece, self._send_next
            return
        if not self.begun:
            self.begun = True
            exchange.start_response(200, _HEADERS, self._lines)
        exchange.write_chunk(piece)
        self._arm()

    def _send_next(self) -> None:
        piece, self._next = self._next, None
        self._exchange.on_writable = None
        if piece is not None:
            self.send_piece(piece)

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


class QueueUpdates(QueuedComments):
    """Queue updates of one stream, with comments during longer silence.

    Args:
        subscribe: subscribes the request at its scheduler.
    """

    __slots__ = ("_form", "_subscribe", "_subscribing")

    def __init__(
        self,
        exchange: ClientExchange,
        interval_s: float,
        lines: bytes,
        form: QueueForm,
        subscribe: Callable[[], None],
    ) -> None:
        super().__init__(exchange, interval_s, lines)
        self._form = form
        self._subscribe = subscribe
        self._subscribing: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timers of the first comment and of the subscription."""
        super().start()
        self._subscribing = asyncio.get_running_loop().call_later(SUBSCRIBE_AFTER_S, self._subscribe)

    def on_grant(self) -> None:
        """Send `started` if the client was notified of waiting."""
        if self.begun:
            self.send_piece(_written(self._form, "started", None))

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Send an outlook; None if the scheduler is not connected."""
        state = "scheduler_unavailable" if outlook is None else "waiting"
        self.send_piece(_written(self._form, state, outlook))

    def stop(self) -> None:
        """Send no further messages, and cancel a pending subscription. Idempotent."""
        super().stop()
        if self._subscribing is not None:
            self._subscribing.cancel()


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
