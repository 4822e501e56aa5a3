"""The one object of a request in a gateway, and the fields added to its body.

Fields are spliced into a JSON body before its closing brace, without re-encoding. A field that the body has
already then occurs twice, and JSON readers use the last one (Python's, pydantic's and msgspec's do). All
other bytes reach the engine as the client wrote them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import msgspec

from serve_app.engines.engine import Message
from serve_app.errors import Outcome
from serve_app.request import EngineTimes, Submission
from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.answer.responses import (
    JSON_TYPE,
    OPENAI,
    ClientApi,
    ClientExchange,
    DisconnectWatch,
    RequestRejected,
)
from serve_app.serving.gateway.answer.stream import Announcements, QueueForm
from serve_app.serving.gateway.request.body import NO_BODY, HeldBody
from serve_app.serving.gateway.request.endpoints import APIS
from serve_app.serving.gateway.request.fields import request_id
from serve_app.serving.gateway.tracing.request_trace import UNTRACED, RequestTrace
from serve_app.serving.gateway.upstream import HeaderList


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTerms:
    """Conditions under which an engine stores a response.

    Attributes:
        owner: tenant that owns the response.
        previous: id of the response that it continues.
        background: the engine continues after its answer, or after a disconnect.
        is_named: the client chose an id, which is replaced because it might be another tenant's.
    """

    owner: str
    previous: str | None = None
    background: bool = False
    is_named: bool = False


class IncomingRequest:
    """A request of a client, from its head to the end of its answer.

    There is one object per request. `RequestReader` sets the second group of attributes once the body was
    read, and `path.GatewayRequest`, which adds the states of a scheduled request, the third. All times are
    seconds on the monotonic clock.

    Attributes:
        exchange: the server's side of the request.
        path: its path at the gateway.
        api: API in which it is answered.
        headers: headers by name in lower case; of repeated ones the last.
        request_id: the gateway's id, unique among all gateways.
        client_request_id: the client's id, or the gateway's if it sent none.
        arrived_at: its head was read.
        trace: recorder of its stages.

        submission: what the scheduler is told about it.
        forwarded: client header lines for the engine.
        body: body for the engine, without fields of the grant; released as soon as it cannot be sent again.
        hide_usage: the client did not request the usage event that ends the stream.
        assembles: the engine streams, but the client requested a non-streamed answer.
        continuable: models whose engines may continue each other's answers (see `continuation`), with the
            longest context of these engines in tokens; None if it is unknown.
        announced: events that begin a stream before its first token.
        response_terms: terms of a stored response; None for other APIs.
        form_model: place of the model's name in a form, to which no fields can be added; None for JSON.
        queue_form: format of queue updates; None if the client does not subscribe.
        requested: the model's name in the body.
        route: the requested name if it is a route's; otherwise empty.
        fallbacks: the submissions to the other models that may serve it, in the order of their use.
        fallback_after_s: longest wait in a queue while a fallback remains; None for no limit.

        submitted_at: it was submitted to the scheduler.
        granted_at: last grant; None before the first.
        first_token_at: first bytes of a streamed answer; None for other answers.
        ended_at: end in the engine or in the queue; None before it.
        engine_times: stage times reported by the engine; None if it reports none.
        response_id: the id of the engine's answer; empty if it has none.
    """

    trace: RequestTrace = UNTRACED
    submission: Submission
    forwarded = b""
    body: HeldBody = NO_BODY
    hide_usage = False
    assembles = False
    continuable: Mapping[str, int | None] = MappingProxyType({})
    announced: Announcements | None = None
    response_terms: ResponseTerms | None = None
    form_model: slice | None = None
    queue_form: QueueForm | None = None
    requested = ""
    route = ""
    fallbacks: tuple[Submission, ...] = ()
    fallback_after_s: float | None = None
    submitted_at = 0.0
    granted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    engine_times: EngineTimes | None = None
    response_id = ""

    def __init__(self, exchange: ClientExchange, own_id: str, arrived_at: float) -> None:
        self.exchange = exchange
        self.path = path = exchange.path
        self.api: ClientApi = APIS.get(path, OPENAI)
        self.headers: Mapping[bytes, bytes] = dict(exchange.headers)
        self.request_id = own_id
        self.client_request_id = request_id(self.headers.get(b"x-request-id"), own_id)
        self.arrived_at = arrived_at

    @property
    def method(self) -> str:
        """HTTP method of the client."""
        return self.exchange.method

    @property
    def engine_method(self) -> str:
        """HTTP method towards the engine. HEAD is sent as GET, because its headers depend on the answer."""
        return "POST" if self.exchange.method == "POST" else "GET"

    @property
    def client(self) -> str:
        """Host of the client; empty for a request from within and for a Unix socket."""
        address = self.exchange.client
        return address[0] if address else ""

    @property
    def id_headers(self) -> HeaderList:
        """Headers that return the id of the request."""
        return self.api.id_headers(self.client_request_id)

    @property
    def id_lines(self) -> bytes:
        """Header lines that return the id of the request."""
        return self.api.id_lines(self.client_request_id)

    def query(self) -> dict[str, list[str]]:
        """Return the parameters of the query."""
        return parse_qs(self.exchange.query.decode("latin-1"))

    def start_response(self, status: int, headers: HeaderList, lines: bytes = b"") -> None:
        """Start the response.

        Args:
            lines: further header lines, which are valid.
        """
        self.exchange.start_response(status, headers, lines)

    def respond(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole response with the id of the request, without waiting for the client."""
        self.start_response(status, [*headers, (b"content-length", b"%d" % len(body))], self.id_lines)
        self.exchange.write_chunk(body, ends=True)

    def reject(self, rejection: RequestRejected, *more: tuple[bytes, bytes]) -> None:
        """Send an error response."""
        headers = [JSON_TYPE, *rejection.headers(), *more]
        self.respond(self.api.status(rejection), headers, self.api.error(rejection))

    async def send(self, message: Message) -> None:
        """Send a part of the response in the form of ASGI, once the client has read those before."""
        if message["type"] == "http.response.start" and b"x-request-id" not in dict(message["headers"]):
            own = (b"x-request-id", self.client_request_id.encode())
            message["headers"] = [*message["headers"], own]
        await self.exchange.send(message)

    async def receive(self) -> Message:
        """Return the next piece of the body, or the disconnect, in the form of ASGI."""
        return await self.exchange.receive()

    def watch(self) -> DisconnectWatch:
        """Return a watch for disconnects, to be entered once the body has been read."""
        return DisconnectWatch(self.exchange)

    def body_for(
        self, submission: Submission, grant: Grant, response_id: str | None, continuation: list[bytes]
    ) -> bytes:
        """Return the body with the fields of a grant and of an attempt.

        Args:
            response_id: name for the response; None if the engine chooses it.
            continuation: fields of `ContinuableAssembly.begin_attempt`.
        """
        model = submission.spec.served_name
        if (place := self.form_model) is not None:
            form = self.body.data
            if model == self.requested:
                return form
            return form[: place.start] + model.encode() + form[place.stop :]
        fields = [*continuation]
        if model != self.requested:
            fields.append(model_field(model))
        if grant.dispatch.engine_priority is not None:
            fields.append(priority_field(grant.dispatch.engine_priority))
        if response_id is not None:
            fields.append(response_id_field(response_id))
        return append_fields(self.body.data, fields)


# -- splicing ---------------------------------------------------------------------------------------------

# vLLM's default for bodies without the field, and the only value that every engine accepts.
NO_PRIORITY = 0

_WITH_USAGE = b'"stream_options":{"include_usage":true}'


# Requests a stream for an answer that the gateway assembles.
AS_STREAM = b'"stream":true,' + _WITH_USAGE


class _OptionsOnly(msgspec.Struct):
    stream_options: dict[str, msgspec.Raw] | None = None


_options_decoder = msgspec.json.Decoder(_OptionsOnly)


def usage_field(body: bytes, *, has_stream_options: bool) -> bytes:
    """Return the field that requests usage in a stream, with the client's other stream options.

    `continuous_usage_stats` is removed. Without `include_usage`, which the client omitted, it has no effect;
    with it, every event would carry usage.
    """
    if not has_stream_options:
        return _WITH_USAGE
    options = _options_decoder.decode(body).stream_options or {}
    options.pop("continuous_usage_stats", None)
    wanted: dict[str, Any] = {**options, "include_usage": True}
    return b'"stream_options":' + msgspec.json.encode(wanted)


def priority_field(value: int) -> bytes:
    """Return the field by which an engine with priority scheduling orders requests; lower is sooner."""
    return b'"priority":%d' % value


def model_field(name: str) -> bytes:
    """Return the field that names the model."""
    return b'"model":' + msgspec.json.encode(name)


def salt_field(salt: str) -> bytes:
    """Return the field that separates a request's blocks in an engine's prefix cache."""
    return b'"cache_salt":' + msgspec.json.encode(salt)


def response_id_field(response_id: str) -> bytes:
    """Return the field by which vLLM names a response; a client's own could overwrite another response."""
    return b'"request_id":' + msgspec.json.encode(response_id)


def append_fields(body: bytes, fields: list[bytes]) -> bytes:
    """Return a JSON object with fields appended.

    Args:
        body: an object with at least one field, as checked by the parser.
        fields: each as `"name":value`.

    Raises:
        RequestRejected: the body does not end with a brace.
    """
    if not fields:
        return body
    end = len(body) - 1
    # Skip trailing white space by index, because rstrip would copy the body.
    while end >= 0 and body[end] in b" \t\r\n":
        end -= 1
    if end < 0 or body[end] != ord("}"):
        raise RequestRejected(Outcome.REJECTED_INVALID, "the body must be one JSON object")
    return b"".join((memoryview(body)[:end], b",", b",".join(fields), b"}"))
