"""What a client hears when its request gets no turn: by the scheduler's word, or because the server stops."""

from serve_app.errors import Conclusion, Outcome
from serve_app.serving.gateway.answer.engine_answer import TooLongError
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.upstream.response import UpstreamError


def stopping(retry_after_s: float) -> RequestRefused:
    """What a request hears that comes, or still waits, when the application stops."""
    return RequestRefused(
        Outcome.REJECTED_STOPPING, "the server is stopping: try again later", retry_after_s=retry_after_s
    )


def as_refusal(refusal: Conclusion, failure: UpstreamError | None) -> RequestRefused:
    """The scheduler's refusal for the client; the engine's own words where it found the request too long."""
    message, param = refusal.message, None
    if refusal.outcome is Outcome.REJECTED_TOO_LONG and isinstance(failure, TooLongError):
        message, param = failure.message, failure.param
    elif refusal.outcome is Outcome.REJECTED_UNKNOWN_RESPONSE:
        param = "previous_response_id"
    elif not message and failure is not None:
        message = str(failure)
    found = RequestRefused(
        refusal.outcome,
        message or f"the request was refused: {refusal.outcome}",
        param=param,
        retry_after_s=refusal.retry_after_s,
    )
    found.rate_limits = refusal.rate_limits
    return found
