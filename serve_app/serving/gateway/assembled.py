"""Deviation: the engine streams, and the client receives one JSON object."""

from typing import TYPE_CHECKING

from serve_app.core.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.answer.assembly import AnswerAssembly
from serve_app.serving.gateway.answer.responses import JSON_TYPE
from serve_app.serving.gateway.answer.stream import StreamScanner, engine_failure
from serve_app.serving.gateway.request.headers import response_headers
from serve_app.serving.gateway.upstream.response import UpstreamError, UpstreamResponse

if TYPE_CHECKING:
    from serve_app.serving.gateway.path import GatewayRequest


class AssembledAnswer:
    """Forwarding of a stream as a non-streamed answer. Failures can be retried until its end."""

    __slots__ = ("_assembly", "_grant", "_has_output", "_request", "_response", "_scanner")

    def __init__(self, request: "GatewayRequest", response: UpstreamResponse, grant: Grant) -> None:
        self._request = request
        self._response = response
        self._grant = grant
        self._scanner = request.scanner = StreamScanner(hide_usage=False)
        self._assembly = request.assembly or AnswerAssembly()
        self._has_output = False

    def on_change(self) -> None:
        """Add the events that have arrived."""
        self._request.guarded(self._advance)

    def _advance(self) -> None:
        response, request = self._response, self._request
        events = self._scanner.feed(response.take())
        if response.complete:
            events += self._scanner.flush()
        self._assembly.feed(events)
        announced = request.announced
        is_output = bool(events) and not (announced is not None and announced.match_all(events))
        if not self._has_output and (is_output or response.complete):
            self._has_output = True
            request.scheduler.first_token(request)
        if response.complete:
            self._end()
        elif response.error is not None:
            raise response.error

    def _end(self) -> None:
        scanner, request = self._scanner, self._request
        status, body = 200, self._assembly.error
        if body is None:
            check_outgrown(request, self._grant)
            body = self._assembly.whole()
        elif scanner.is_engine_error:
            request.check_retry(engine_failure(scanner))
            status = 500
        else:
            status = 400
        request.conclude_stream(scanner)
        headers = response_headers(self._response.headers)
        others = [pair for pair in headers if pair[0] != b"content-type"]
        request.respond_whole(status, [JSON_TYPE, *others], body)


def check_outgrown(request: "GatewayRequest", grant: Grant) -> None:
    """Raise `UpstreamError` if an engine with a longer context can continue the answer."""
    assembly = request.assembly
    if assembly is not None and assembly.outgrows(grant.address.max_model_len):
        raise UpstreamError(DispatchFailure.TOO_LONG, "the answer outgrew the engine's context")
