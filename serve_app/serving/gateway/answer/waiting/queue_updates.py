"""What a waiting stream is told of the queue, for clients that ask with `x-ewsjf-queue`.

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
from serve_app.serving.gateway.answer.responses import HeaderList, encode
from serve_app.serving.gateway.answer.waiting.queued_comments import QueuedComments

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
