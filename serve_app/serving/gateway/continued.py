"""Deviation: a stream that another engine can continue, as long as the client lacks its end."""

from time import monotonic
from typing import TYPE_CHECKING

from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.answer.continuation import ContinuableStream
from serve_app.serving.gateway.answer.stream import StreamScanner, engine_failure
from serve_app.serving.gateway.assembled import check_outgrown
from serve_app.serving.gateway.observing import observe
from serve_app.serving.gateway.upstream.response import UpstreamResponse

if TYPE_CHECKING:
    from serve_app.serving.gateway.path import GatewayRequest


class ContinuedStream:
    """Forwarding of a stream, or of the rest of one. Failures can be retried until its end."""

    __slots__ = ("_gaps", "_grant", "_has_output", "_last_at", "_request", "_response", "_scanner", "_stream")

    def __init__(
        self, request: "GatewayRequest", response: UpstreamResponse, grant: Grant, stream: ContinuableStream
    ) -> None:
        self._request = request
        self._response = response
        self._grant = grant
        self._stream = stream
        self._scanner = request.scanner = StreamScanner(hide_usage=False)
        self._gaps = observe(request.services.telemetry.itl_histogram, request.submission, grant.dispatch)
        self._last_at = 0.0
        self._has_output = False

    def on_change(self) -> None:
        """Pass on the events that have arrived, as soon as the client reads."""
        self._request.guarded(self._advance)

    def _advance(self) -> None:
        response, request, exchange = self._response, self._request, self._request.exchange
        if exchange.is_choked and not response.has_ended:
            exchange.on_writable = self.on_change
            return
        events = self._scanner.feed(response.take())
        if response.complete:
            events += self._scanner.flush()
        self._stream.feed(events)
        if not self._has_output:
            if not events and not response.has_ended:
                return
            if response.error is not None and not events:
                raise response.error
            self._has_output, self._last_at = True, monotonic()
            request.scheduler.first_token(request)
        elif events:
            now = monotonic()
            gap_s = now - self._last_at
            if self._gaps is not None:
                observe(self._gaps.observe, gap_s)
            if gap_s > request.longest_gap_s:
                request.longest_gap_s, request.gap_ended_at = gap_s, now
            self._last_at = now
        if response.complete or self._scanner.error is not None:
            self._end()
            return
        if ready := self._stream.ready():
            self._begin()
            exchange.write_chunk(ready)
            self._stream.drop_ready()
        if response.error is not None:
            raise response.error

    def _begin(self) -> None:
        request = self._request
        if not request.has_begun:
            request.first_token_at = monotonic()
        request.begin_stream(self._response)

    def _end(self) -> None:
        request, scanner = self._request, self._scanner
        if scanner.error is None:
            check_outgrown(request, self._grant)
            events = self._stream.end()
            request.conclude_stream(scanner)
        else:
            failure = engine_failure(scanner)
            if scanner.is_engine_error:
                request.check_retry(failure)
            events = self._stream.ready() + request.broken_stream(failure, scanner)
        self._begin()
        request.finish_stream(events)
