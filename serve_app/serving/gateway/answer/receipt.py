"""Stage times of a request: for its receipt at the scheduler, and for the client if it requests them."""

from typing import Any

from serve_app.core.commands import Dispatch
from serve_app.request import EngineTimes, RequestTimes
from serve_app.serving.gateway.answer.responses import encode
from serve_app.serving.gateway.request.headers import RECEIPT_HEADER
from serve_app.serving.gateway.request.incoming import IncomingRequest


def request_times(request: IncomingRequest, granted_at: float | None, waited_until: float) -> RequestTimes:
    """Return the stage times known so far.

    Args:
        granted_at: None if the request ended in the queue.
        waited_until: the last grant, or the end without one.
    """
    first_at, ended_at = request.first_token_at, request.ended_at
    return RequestTimes(
        request.path,
        request.submitted_at - request.arrived_at,
        waited_until - request.submitted_at,
        None if first_at is None or granted_at is None else first_at - granted_at,
        None if ended_at is None or granted_at is None else ended_at - granted_at,
        request.engine_times,
    )


def receipt_line(request: IncomingRequest, dispatch: Dispatch) -> bytes:
    """Return the header line of the receipt for a client that sent `x-ewsjf-receipt: 1`."""
    return RECEIPT_HEADER + b": " + encode(_receipt(request, dispatch)) + b"\r\n"


def receipt_comment(request: IncomingRequest, dispatch: Dispatch) -> bytes:
    """Return the receipt as a comment for the end of an event stream."""
    return b": " + RECEIPT_HEADER[2:] + b" " + encode(_receipt(request, dispatch)) + b"\n\n"


def _receipt(request: IncomingRequest, dispatch: Dispatch) -> dict[str, Any]:
    waited, engine, granted_at = dispatch.waited, request.engine_times, request.granted_at
    inside = {} if engine is None else {"engine_ms": _engine_ms(engine)}
    return {
        "wait_ms": round(dispatch.queue_wait_s * 1e3, 3),
        "causes_ms": {} if waited is None else {cause: ns / 1e6 for cause, ns in waited.causes.items()},
        "ahead": {} if waited is None else waited.ahead,
        "stages_ms": {} if granted_at is None else _stages_ms(request, granted_at, dispatch),
        **inside,
    }


def _stages_ms(request: IncomingRequest, granted_at: float, dispatch: Dispatch) -> dict[str, float]:
    """Return the completed stages under the names that the scheduler's receipts use."""
    stages = request_times(request, granted_at, granted_at).stages(dispatch.queue_wait_s)
    return {name: round(seconds * 1e3, 3) for name, seconds in stages}


def _engine_ms(engine: EngineTimes) -> dict[str, float]:
    """Return the engine's stage times in milliseconds."""
    named = {"queue": engine.queue_s, "prefill": engine.prefill_s, "generation": engine.generation_s}
    return {name: round(seconds * 1e3, 3) for name, seconds in named.items() if seconds is not None}
