"""An incoming request: its head, and the ASGI channels to its client."""

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.engines.engine import Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request of which only the head has been looked at.

    Attributes:
        request_id: the gateway's own, unique among all gateways.
        client_request_id: the client's, or the gateway's when it sent none.
        arrived_at: on the event loop's clock, in seconds.
    """

    scope: Scope
    receive: Receive
    send: Send
    path: str
    headers: Mapping[bytes, bytes]
    request_id: str
    client_request_id: str
    arrived_at: float
