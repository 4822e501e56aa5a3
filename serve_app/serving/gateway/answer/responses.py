"""Responses that the gateway writes itself: errors in OpenAI's shape, rejections, and small JSON documents.

Rejections by the scheduler or a stopping server become errors here, with `Retry-After` and rate-limit headers
under OpenAI's names.
"""

import math
from dataclasses import dataclass

import msgspec

from serve_app.engines.engine import Send
from serve_app.errors import HTTP_STATUS, Conclusion, Outcome, ServeAppError
from serve_app.request import LimitStatus, RateLimitStatus
from serve_app.serving.api_keys import KeyRecord
from serve_app.serving.gateway.answer.engine_answer import TooLongError
from serve_app.serving.gateway.upstream.response import HeaderList, UpstreamError

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{unit}"
    for unit in ("requests", "tokens")
    for figure in ("limit", "remaining", "reset")
)


def rate_limit_headers(status: RateLimitStatus | None) -> list[tuple[bytes, bytes]]:
    """Return three headers for each per-minute limit of the key."""
    if status is None:
        return []
    return [*_of(b"requests", status.requests), *_of(b"tokens", status.tokens)]


def _of(unit: bytes, status: LimitStatus | None) -> list[tuple[bytes, bytes]]:
    if status is None:
        return []
    return [
        (b"x-ratelimit-limit-" + unit, b"%d" % status.limit),
        (b"x-ratelimit-remaining-" + unit, b"%d" % status.remaining),
        (b"x-ratelimit-reset-" + unit, duration(status.reset_s)),
    ]


def duration(seconds: float) -> bytes:
    """Format a duration as OpenAI does, rounded up to 0.1 s: `250ms`, `12.5s`, `1m0.5s`."""
    if seconds <= 0:
        return b"0s"
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(math.ceil(round(seconds * 10, 6)), 600)
    text = f"{rest / 10:g}s".encode()
    return b"%dm" % minutes + text if minutes else text


JSON_TYPE = (b"content-type", b"application/json")

DROPPED_REASON_HEADER = b"x-llm-d-request-dropped-reason"

# Error code of requests that are rejected or aborted because the application stops.
STOPPING_CODE = "shutting_down"

# Error code for an authenticated caller without permission: 403, where 401 is for unknown callers.
NOT_ALLOWED_CODE = "not_allowed"

# OpenAI's own values where they exist; SDKs map statuses and codes to exception classes.
_TYPE_AND_CODE: dict[Outcome, tuple[str, str | None]] = {
    Outcome.REJECTED_INVALID: ("invalid_request_error", None),
    Outcome.REJECTED_UNAUTHORISED: ("invalid_request_error", "invalid_api_key"),
    Outcome.REJECTED_UNKNOWN_MODEL: ("invalid_request_error", "model_not_found"),
    Outcome.REJECTED_UNKNOWN_RESPONSE: ("invalid_request_error", "response_not_found"),
    Outcome.REJECTED_BODY_TOO_LARGE: ("invalid_request_error", "body_too_large"),
    Outcome.REJECTED_TOO_LONG: ("invalid_request_error", "context_length_exceeded"),
    Outcome.REJECTED_QUEUE_FULL: ("rate_limit_error", "queue_full"),
    Outcome.REJECTED_DEADLINE_UNMEETABLE: ("rate_limit_error", "deadline_unmeetable"),
    Outcome.REJECTED_RATE_LIMITED: ("rate_limit_error", "rate_limit_exceeded"),
    Outcome.REJECTED_NO_REPLICA: ("server_error", "no_replica"),
    Outcome.REJECTED_STOPPING: ("server_error", STOPPING_CODE),
    Outcome.EXPIRED: ("server_error", "queue_timeout"),
    Outcome.FAILED: ("server_error", "engine_failed"),
    Outcome.CANCELLED: ("server_error", "cancelled"),
}

# The reasons of llm-d's router for the same ends (pkg/common/error/error.go), for clients that know it.
_DROPPED_REASON: dict[Outcome, bytes] = {
    Outcome.REJECTED_QUEUE_FULL: b"rejected-saturated",
    Outcome.REJECTED_DEADLINE_UNMEETABLE: b"rejected-saturated",
    Outcome.REJECTED_STOPPING: b"rejected-shutting-down",
    Outcome.EXPIRED: b"rejected-ttl-expired",
}

_encoder = msgspec.json.Encoder()


class RequestRejected(ServeAppError):  # noqa: N818 - an outcome of requests, not an internal error
    """A request ends with an error response, before or instead of an engine's.

    Attributes:
        outcome: selects the HTTP status, and the error's type and code.
        param: the field or header at fault.
        code: overrides the outcome's code.
        status: overrides the outcome's HTTP status (404 and 405 for unknown paths and methods).
        retry_after_s: when a retry is useful; None for no statement.
        rate_limits: state of the key's rate limits.
        key: API key of the request, for the log; None if it is not known.
        may_retry: False adds `x-should-retry: false`, which OpenAI's SDKs obey.
    """

    may_retry = True

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.param = param
        self.code = code
        self.status = status or (403 if code == NOT_ALLOWED_CODE else HTTP_STATUS[outcome])
        self.retry_after_s = retry_after_s
        self.rate_limits: RateLimitStatus | None = None
        self.key: KeyRecord | None = None

    def body(self) -> bytes:
        """Return the error in OpenAI's shape."""
        kind, code = _TYPE_AND_CODE[self.outcome]
        detail = ErrorDetail(self.message, kind, self.param, self.code or code)
        return _encoder.encode({"error": detail})

    def headers(self) -> HeaderList:
        """Return authentication, rate-limit and retry headers, and the reason in llm-d's words."""
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        found = rate_limit_headers(self.rate_limits)
        if not self.may_retry:
            found.append((b"x-should-retry", b"false"))
        if (reason := _DROPPED_REASON.get(self.outcome)) is not None:
            found.append((DROPPED_REASON_HEADER, reason))
        if self.retry_after_s is not None:
            wait_s = max(self.retry_after_s, 0.0)
            found.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
            found.append((b"retry-after-ms", b"%d" % max(1, math.ceil(wait_s * 1000))))
        return found


class ForbiddenError(RequestRejected):
    """The caller is authenticated but lacks permission (403); 401 means a missing or invalid key."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(Outcome.REJECTED_UNAUTHORISED, message, param=param, code=NOT_ALLOWED_CODE)


class EngineTimedOut(RequestRejected):
    """An engine sent nothing for too long. Not retryable, because another engine would take as long."""

    may_retry = False

    def __init__(self, message: str) -> None:
        super().__init__(Outcome.FAILED, message, code="engine_timeout", status=504)


class MethodRejected(RequestRejected):
    """A path was requested with a method other than the `allowed` ones."""

    def __init__(self, method: str, path: str, allowed: str) -> None:
        message = f"{method} is not allowed for {path[:200]}: use {allowed}"
        if method == "OPTIONS":
            message += "; for web pages of other origins, set gateway.cors.allow_origins"
        super().__init__(Outcome.REJECTED_INVALID, message, code="method_not_allowed", status=405)
        self.allowed = allowed

    def headers(self) -> HeaderList:
        """Return the supported methods."""
        return [(b"allow", b"GET, HEAD" if self.allowed == "GET" else self.allowed.encode())]


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


def data_event(body: bytes) -> bytes:
    """Return a document as a server-sent event."""
    return b"data: " + body.replace(b"\r", b"").replace(b"\n", b"\ndata: ") + b"\n\n"


async def send_json(send: Send, status: int, body: bytes, headers: HeaderList) -> None:
    """Send an encoded JSON document."""
    await send_body(send, status, [JSON_TYPE, *headers], body)


async def send_body(send: Send, status: int, headers: HeaderList, body: bytes) -> None:
    """Send a non-streamed response, with its length."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def header_text(value: bytes) -> str:
    """Return a header as its sender wrote it: UTF-8, or Latin-1 if it is not valid UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def encode(document: object) -> bytes:
    """Encode a small document as JSON."""
    return _encoder.encode(document)


def stopping(retry_after_s: float) -> RequestRejected:
    """Return the rejection of requests that arrive or wait while the application stops."""
    return RequestRejected(
        Outcome.REJECTED_STOPPING, "the server is stopping: retry later", retry_after_s=retry_after_s
    )


def as_rejection(rejection: Conclusion, failure: UpstreamError | None) -> RequestRejected:
    """Convert the scheduler's rejection, with the engine's message if it found the request too long."""
    message, param = rejection.message, None
    if rejection.outcome is Outcome.REJECTED_TOO_LONG and isinstance(failure, TooLongError):
        message, param = failure.message, failure.param
    elif rejection.outcome is Outcome.REJECTED_UNKNOWN_RESPONSE:
        param = "previous_response_id"
    elif not message and failure is not None:
        message = str(failure)
    found = RequestRejected(
        rejection.outcome,
        message or f"the request was rejected: {rejection.outcome}",
        param=param,
        retry_after_s=rejection.retry_after_s,
    )
    found.rate_limits = rejection.rate_limits
    return found
