"""An incoming request: its head, and the ASGI channels to its client."""

from collections.abc import Mapping

import msgspec

from serve_app.engines.engine import Receive, Scope
from serve_app.serving.gateway.answer.client_api import ClientApi
from serve_app.serving.gateway.answer.client_stream import ClientStream, exchange_of
from serve_app.serving.gateway.answer.disconnect import DisconnectWatch
from serve_app.serving.gateway.answer.responses import HeaderList
from serve_app.serving.gateway.tracing.request_trace import UNTRACED, RequestTrace


class IncomingRequest(msgspec.Struct, frozen=True):
    """A request of which only the head has been looked at.

    Attributes:
        api: in which it is answered.
        request_id: the gateway's own, unique among all gateways.
        client_request_id: the client's, or the gateway's when it sent none.
        arrived_at: on the monotonic clock, in seconds.
        trace: told what happens to it.
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
        """What tells the client the id of its request."""
        return self.api.id_headers(self.client_request_id)

    def watch(self) -> DisconnectWatch:
        """A watch for the client's end, to be entered once the body has been read."""
        return DisconnectWatch(self.receive, exchange_of(self.scope))
