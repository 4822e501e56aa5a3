"""A request as it comes in, the job that is made of it, and the fields that are added to its body.

Fields are spliced into a JSON body without parsing and writing it again: appended before the closing brace.
Where the body has one already there are then two, and JSON readers take the last (Python's, pydantic's and
msgspec's do), so the rest of the body reaches the engine byte by byte as the client wrote it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.engines.engine import Receive, Scope
from serve_app.errors import Outcome
from serve_app.request import Submission
from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.answer.client import ClientStream, DisconnectWatch
from serve_app.serving.gateway.answer.client_api import ClientApi
from serve_app.serving.gateway.answer.responses import HeaderList, RequestRefused
from serve_app.serving.gateway.answer.stream import Announcements
from serve_app.serving.gateway.answer.waiting import QueueForm
from serve_app.serving.gateway.request.body import HeldBody
from serve_app.serving.gateway.tracing.request_trace import UNTRACED, RequestTrace


class IncomingRequest(msgspec.Struct, frozen=True):
    """A request of which only the head has been looked at.

    Attributes:
        api: in which it is answered.
        request_id: the gateway's own, unique among all gateways.
        client_request_id: the client's, or the gateway's when it sent none.
        arrived_at: on the monotonic clock, in seconds.
        trace: records its stages.
    """

    scope: Scope
    receive: Receive
    send: ClientStream
    path: str
    api: ClientApi
    headers: Mapping[bytes, bytes]
    request_id: str
    client_request_id: str
    arrived_at: float
    trace: RequestTrace = UNTRACED

    @property
    def method(self) -> str:
        """With which an engine is asked: for what HEAD would say it has to be asked with GET."""
        return "POST" if self.scope["method"] == "POST" else "GET"

    @property
    def id_of_client(self) -> str:
        """The id that the client gave it; empty where it gave none."""
        return "" if self.client_request_id == self.request_id else self.client_request_id

    @property
    def id_headers(self) -> HeaderList:
        """The headers with the id of the request."""
        return self.api.id_headers(self.client_request_id)

    def watch(self) -> DisconnectWatch:
        """A watch for the client's end, to be entered once the body has been read."""
        return DisconnectWatch(self.send.exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTerms:
    """The terms on which an engine keeps a response.

    Attributes:
        owner: the tenant whose response it will be.
        previous: id of the response that it goes on from.
        background: the engine works on after its answer, or after its client has left.
        is_named: its client gives it a name, which must be replaced: it might be another tenant's.
    """

    owner: str
    previous: str | None = None
    background: bool = False
    is_named: bool = False


class ForwardJob(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was read and checked, with all that is needed to serve it.

    Attributes:
        forwarded: lines of the client's headers for the engine.
        body: as the engine gets it, but for what a grant brings. It is released as soon as it cannot be sent
            again.
        hide_usage: the client did not ask for the usage event that ends the stream.
        assembles: the engine streams, and the client wants the answer in one piece.
        announced: the events with which a stream begins before its first token.
        response: for the Responses API.
        is_form: the body is a form, to which nothing can be added.
        queue_form: format of queue updates; None where its client does not subscribe.
    """

    incoming: IncomingRequest
    submission: Submission
    forwarded: bytes
    body: HeldBody
    hide_usage: bool
    assembles: bool = False
    announced: Announcements | None = None
    response: ResponseTerms | None = None
    is_form: bool = False
    queue_form: QueueForm | None = None

    def body_for(self, grant: Grant, response_id: str | None) -> bytes:
        """The body with what this grant brings; the very same bytes where that is nothing.

        Args:
            response_id: the id that the response gets; None where the engine names it.
        """
        fields = []
        if grant.dispatch.engine_priority is not None and not self.is_form:
            fields.append(priority_field(grant.dispatch.engine_priority))
        if response_id is not None:
            fields.append(response_id_field(response_id))
        return append_fields(self.body.data, fields)


# -- splicing ---------------------------------------------------------------------------------------------

# What vLLM takes a body without the field for, and the only value that every engine accepts.
NO_PRIORITY = 0

_WITH_USAGE = b'"stream_options":{"include_usage":true}'


# Makes a stream of an answer that was wanted in one piece, for the gateway to assemble.
AS_STREAM = b'"stream":true,' + _WITH_USAGE


class _OptionsOnly(msgspec.Struct):
    stream_options: dict[str, msgspec.Raw] | None = None


_options_decoder = msgspec.json.Decoder(_OptionsOnly)


def usage_field(body: bytes, *, has_stream_options: bool) -> bytes:
    """The field that asks an engine for a stream's usage; keeps the client's other stream options.

    But for `continuous_usage_stats`: without `include_usage`, which the client left out, it does nothing, and
    with it every event would carry usage that nobody asked for.
    """
    if not has_stream_options:
        return _WITH_USAGE
    options = _options_decoder.decode(body).stream_options or {}
    options.pop("continuous_usage_stats", None)
    wanted: dict[str, Any] = {**options, "include_usage": True}
    return b'"stream_options":' + msgspec.json.encode(wanted)


def priority_field(value: int) -> bytes:
    """The field that an engine with priority scheduling orders by; lower is served first."""
    return b'"priority":%d' % value


def salt_field(salt: str) -> bytes:
    """The field that keeps a request's blocks apart in an engine's prefix cache."""
    return b'"cache_salt":' + msgspec.json.encode(salt)


def response_id_field(response_id: str) -> bytes:
    """The field by which vLLM names a response; a client's own would let it overwrite another's."""
    return b'"request_id":' + msgspec.json.encode(response_id)


def append_fields(body: bytes, fields: list[bytes]) -> bytes:
    """A JSON object with more fields at its end.

    Args:
        body: an object with at least one field, checked by the parser before.
        fields: each as `"name":value`.

    Raises:
        RequestRefused: the body does not end with a brace.
    """
    if not fields:
        return body
    end = len(body) - 1
    # White space may follow the object. Stepping back copies nothing, unlike rstrip.
    while end >= 0 and body[end] in b" \t\r\n":
        end -= 1
    if end < 0 or body[end] != ord("}"):
        raise RequestRefused(Outcome.REJECTED_INVALID, "the body must be one JSON object")
    return b"".join((memoryview(body)[:end], b",", b",".join(fields), b"}"))
