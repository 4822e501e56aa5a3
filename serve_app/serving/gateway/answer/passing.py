"""The passing of an engine's stream to its client while it arrives, without a task that wakes for each piece.

What the engine sends is looked at and written within the callback that brings it. While the client does not
read, pieces stay in the answer's buffer; that is bounded, and TCP then slows the engine down.
"""

import asyncio
from time import monotonic

from serve_app.serving.gateway.answer.client_stream import ClientStream
from serve_app.serving.gateway.answer.sse import StreamScanner
from serve_app.serving.gateway.upstream.response import UpstreamResponse
from serve_app.serving.metric_cells import HistogramCell


class StreamPassing:
    """One stream whose first events have been taken; use once.

    Args:
        gaps: where the time between two pieces is counted.
    """

    __slots__ = ("_client", "_fault", "_gaps", "_has_room", "_last_at", "_response", "_scanner")

    def __init__(
        self, response: UpstreamResponse, scanner: StreamScanner, client: ClientStream, gaps: HistogramCell
    ) -> None:
        self._gaps = gaps
        self._last_at = monotonic()
        self._response = response
        self._scanner = scanner
        self._client = client
        self._has_room = True
        self._fault: Exception | None = None

    async def run(self, events: bytes) -> bytes:
        """Pass on `events` and all that comes, but for what comes with the stream's end or break.

        Returns:
            The last events. They are here as soon as the engine has ended, also when the client has not read
            all that it was sent before.

        Raises:
            ClientGone: the client does not read.
            OSError: it has gone.
        """
        response, client = self._response, self._client
        client.on_room = self._go_on
        self._has_room = client.pass_on(events)
        response.on_pieces = self._take
        try:
            self._pass_on()
            await client.passing(self._waiter)
        finally:
            response.on_pieces = None
        if self._fault is not None:
            raise self._fault
        return self._scanner.feed(response.take()) + (self._scanner.flush() if response.complete else b"")

    def _waiter(self) -> "asyncio.Future[None] | None":
        response = self._response
        if response.complete or response.error is not None or self._fault is not None:
            return None
        return response.waiter()

    def _take(self) -> None:
        """Pieces have come."""
        now = monotonic()
        self._gaps.observe(now - self._last_at)
        self._last_at = now
        self._pass_on()

    def _pass_on(self) -> None:
        if not self._has_room or self._response.complete:
            return
        try:
            events = self._scanner.feed(self._response.take())
            if events:
                self._has_room = self._client.pass_on(events)
        except Exception as error:  # noqa: BLE001 - the task that serves the request hears of it
            self._fault = error
            self._response.close()

    def _go_on(self) -> None:
        self._has_room = True
        self._pass_on()
