"""Outcomes of requests, and the package's exceptions.

Every request reaches exactly one `Outcome`, which labels the metrics and determines the HTTP status.
"""

import enum
from dataclasses import dataclass

from serve_app.request import RateLimitStatus


class Outcome(enum.StrEnum):
    """The outcome of a request, grouped by the phase in which it is reached."""

    # Rejected.
    REJECTED_INVALID = "rejected_invalid"
    REJECTED_UNAUTHORISED = "rejected_unauthorised"
    REJECTED_UNKNOWN_MODEL = "rejected_unknown_model"
    REJECTED_UNKNOWN_RESPONSE = "rejected_unknown_response"
    REJECTED_BODY_TOO_LARGE = "rejected_body_too_large"
    REJECTED_TOO_LONG = "rejected_too_long"
    REJECTED_QUEUE_FULL = "rejected_queue_full"
    REJECTED_DEADLINE_UNMEETABLE = "rejected_deadline_unmeetable"
    REJECTED_RATE_LIMITED = "rejected_rate_limited"
    REJECTED_NO_REPLICA = "rejected_no_replica"
    REJECTED_STOPPING = "rejected_stopping"
    # Expired in the queue.
    EXPIRED = "expired"
    # Cancelled by the client, at any time.
    CANCELLED = "cancelled"
    # After dispatch.
    FAILED = "failed"
    COMPLETED = "completed"

    @property
    def is_rejection(self) -> bool:
        """True if the request was rejected, here or by an engine."""
        return self.value.startswith("rejected")


HTTP_STATUS: dict[Outcome, int] = {
    Outcome.REJECTED_INVALID: 400,
    Outcome.REJECTED_UNAUTHORISED: 401,
    Outcome.REJECTED_UNKNOWN_MODEL: 404,
    Outcome.REJECTED_UNKNOWN_RESPONSE: 404,
    Outcome.REJECTED_BODY_TOO_LARGE: 413,
    Outcome.REJECTED_TOO_LONG: 400,
    Outcome.REJECTED_QUEUE_FULL: 429,
    Outcome.REJECTED_DEADLINE_UNMEETABLE: 429,
    Outcome.REJECTED_RATE_LIMITED: 429,
    Outcome.REJECTED_NO_REPLICA: 503,
    Outcome.REJECTED_STOPPING: 503,
    Outcome.EXPIRED: 504,
    Outcome.CANCELLED: 499,
    Outcome.FAILED: 502,
    Outcome.COMPLETED: 200,
}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The end of a request: its outcome, and the details for its client.

    Attributes:
        message: for the client if it gets no answer of an engine; names the value and the remedy.
        retry_after_s: seconds after which the client may retry; None if a retry is useless.
        rate_limits: status of the limits of the request's key; None if it has none.
    """

    outcome: Outcome
    message: str = ""
    retry_after_s: float | None = None
    rate_limits: RateLimitStatus | None = None


class ServeAppError(Exception):
    """Base of every exception that this package raises on purpose."""


class SettingsError(ServeAppError, ValueError):
    """A setting is unknown, missing or out of range. The message names it and the remedy."""


class EngineError(ServeAppError):
    """An engine could not start, or stopped answering."""


class ChannelError(ServeAppError):
    """The control channel rejected or lost a peer."""
