"""A request that has reached its outcome, as telemetry gets it."""

from dataclasses import dataclass

from serve_app.metrics.record import RequestRecord
from serve_app.serving.gateway.request.incoming import IncomingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcludedRequest:
    """One concluded request, with what the record does not hold.

    Attributes:
        record: timestamps on the gateway's clock and counts.
        incoming: as it came.
        model: its name; empty when the request was refused before that was known.
        endpoint: its path, if that is one of ours.
        key_id: of the API key that it came with, which is not secret; empty when there was none.
        attempts: how often it was sent to a replica.
        status: of HTTP, as the client got it; 0 when it got none.
    """

    record: RequestRecord
    incoming: IncomingRequest
    model: str
    endpoint: str
    key_id: str = ""
    attempts: int = 0
    status: int = 0
