"""Interpretation of engines' responses, and the responses that the gateway writes itself.

- `failure_of`: decides from an engine's answer whether it is passed on, or the request retried elsewhere.
- `RequestRejected`, `as_rejection`: rejections by the gateway, the scheduler or a stopping server become
  errors with `Retry-After` and rate-limit headers under OpenAI's names.
- `in_openai_shape`: converts errors of engines to OpenAI's shape.
- `ClientApi`: an API of clients, as far as the gateway writes in it: errors, and the request-id header.
- `ClientExchange`: the client's side of a request.

`ClientApi`. OpenAI's errors are `{"error": {"message", "type", "param", "code"}}`. Anthropic's are `{"type":
"error", "error": {"type", "message"}}` with other types; in a stream they are an event named `error`. vLLM
uses its own types there, and OpenAI's shape for some errors; Anthropic's SDKs accept neither.

`in_openai_shape`. Engine errors are converted to OpenAI's shape, because SDKs display no other. vLLM's own
errors have it, but not those of its web framework: a route that the model does not have is `{"detail":"Not
Found"}`. Other servers use further shapes.

`ClientExchange`. The gateway's server (`serving.http_server`) provides an `Exchange`. A batch provides
another one for its requests (`batches.runner`).

A server's `drain` waits while the client does not read. The server disconnects a client that reads nothing
for too long, so no wait lasts forever.

`failure_of`. The answers of an engine:

| answer                             | meaning                                                           |
|------------------------------------|-------------------------------------------------------------------|
| 2xx                                | the answer                                                        |
| 400, 422 about the context length  | TOO_LONG: a pool with a longer context may serve it               |
| 401, 403                           | UNREACHABLE: the replica does not accept the gateway              |
| 429, 503                           | BUSY; UNREACHABLE while it drains: it has not begun the request   |
| 501                                | not supported by the engine: passed on                            |
| 504                                | a timeout, which a retry would not shorten: passed on             |
| 5xx of an engine that is dead      | LOST: the request may have caused the failure                     |
| other 5xx                          | ENGINE_ERROR the first time, passed on the second time            |
| other 3xx, 4xx                     | the engine rejected the request itself: passed on                  |
"""

import math
import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.engines.adapters.server import TYPE_OF_LLAMA_CPP, is_too_long
from serve_app.errors import HTTP_STATUS, Conclusion, Outcome, ServeAppError
from serve_app.request import LimitStatus, RateLimitStatus
from serve_app.serving.gateway.upstream import HeaderList, UpstreamError

DRAINING_HEADER = b"x-replica-draining"
# vLLM's errors for all requests that were running when its core process died.
_DEAD = re.compile(r"EngineCore encountered an issue|EngineDeadError")
_MESSAGE_CHARACTERS = 500


class TooLongError(UpstreamError):
    """The engine's context limit, which it may report in a field, is below the request's length."""

    def __init__(self, message: str, param: str | None, context_tokens: int | None = None) -> None:
        # The scheduler parses the limit from this message (`engines.adapters.server.stated_context_limit`).
        named = f"{message} (n_ctx={context_tokens})" if context_tokens else message
        super().__init__(DispatchFailure.TOO_LONG, named)
        self.message = message
        self.param = param


class _Detail(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None
    type: str | None = None
    n_ctx: int | None = None

    @property
    def is_too_long(self) -> bool:
        return (
            self.code == "context_length_exceeded"
            or self.type == TYPE_OF_LLAMA_CPP
            or is_too_long(self.message)
        )


class _Flat(_Detail):
    """An error at the top level, as of older vLLM; newer ones nest it as OpenAI does, TGI nests a string."""

    error: _Detail | str | None = None


_decoder = msgspec.json.Decoder(_Flat)


def failure_of(status: int, headers: HeaderList, body: bytes) -> UpstreamError | None:
    """Return why the request must be retried elsewhere; None if the answer is for the client."""
    if status < 400:
        return None
    detail = _detail(body)
    if status in (400, 422):
        return TooLongError(detail.message, detail.param, detail.n_ctx) if detail.is_too_long else None
    failure = _failure_of_status(status, headers)
    if failure is None:
        return None
    if failure is DispatchFailure.ENGINE_ERROR and is_dead(detail.message):
        failure = DispatchFailure.LOST
    message_text = detail.message[:_MESSAGE_CHARACTERS]
    return UpstreamError(
        failure,
        f"the engine answered {status}: {message_text}" if message_text else f"the engine answered {status}",
        _retry_after_s(headers) if failure is DispatchFailure.BUSY else None,
    )


def is_dead(message: str) -> bool:
    """Return whether an engine's error message reports that the engine has died."""
    return _DEAD.search(message) is not None


def outcome_of(status: int) -> Outcome:
    """Return the outcome of a request whose answer is passed on."""
    if status < 300:
        return Outcome.COMPLETED
    if status == 413:
        return Outcome.REJECTED_BODY_TOO_LARGE
    if status >= 500 and status != 501:
        return Outcome.FAILED
    return Outcome.REJECTED_INVALID


def _failure_of_status(status: int, headers: HeaderList) -> DispatchFailure | None:
    if status in (401, 403):
        return DispatchFailure.UNREACHABLE
    if status in (429, 503):
        draining = any(name == DRAINING_HEADER for name, _ in headers)
        return DispatchFailure.UNREACHABLE if draining else DispatchFailure.BUSY
    if status >= 500 and status not in (501, 504):
        return DispatchFailure.ENGINE_ERROR
    return None


def _retry_after_s(headers: HeaderList) -> float | None:
    """Return the pause that an engine asks for; None without one, or if it is a date."""
    stated = dict(headers)
    for name, unit_s in ((b"retry-after-ms", 0.001), (b"retry-after", 1.0)):
        try:
            seconds = unit_s * float(stated[name])
        except (KeyError, ValueError):
            continue
        if 0 < seconds < math.inf:
            return seconds
    return None


def _detail(body: bytes) -> _Detail:
    try:
        found = _decoder.decode(body)
    except (ValueError, RecursionError):
        return _Detail(message=body[:_MESSAGE_CHARACTERS].decode("utf-8", "replace"))
    if isinstance(found.error, str):
        return _Detail(message=found.error)
    return found.error or found


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

    def __init__(self, error: Exception) -> None:
        message = f"the engine did not answer in time: {error}"
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


_CODES = {404: "not_found", 405: "method_not_allowed"}
_NOT_FOUND = "Not Found"


def in_openai_shape(status: int, path: str, headers: HeaderList, body: bytes) -> tuple[HeaderList, bytes]:
    """Return headers and body of an answer of the route `path`; errors are converted to OpenAI's shape."""
    if status < 400:
        return headers, body
    found = _parsed(body)
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return headers, body
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = found.get("param") if isinstance(found, dict) else None
    detail = ErrorDetail(
        _message(status, path, found, body),
        kind,
        param if isinstance(param, str) else None,
        _CODES.get(status),
    )
    others = [pair for pair in headers if pair[0] != b"content-type"]
    return [JSON_TYPE, *others], encode({"error": detail})


def error_message(status: int, path: str, body: bytes) -> str:
    """Return the message of an engine's error of any shape."""
    found = _parsed(body)
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    return _message(status, path, found, body)


def _message(status: int, path: str, found: Any, body: bytes) -> str:
    message_text = _raw_message(found, body)
    if status == 404 and message_text in ("", _NOT_FOUND):
        return f"the engine of this model does not serve {path}"
    return message_text or f"the engine answered {status} without a message"


def _parsed(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None


def _raw_message(found: Any, body: bytes) -> str:
    """Return the engine's message from the field that has it, or else the body."""
    if isinstance(found, dict):
        text = next((found[name] for name in ("message", "detail", "error") if found.get(name)), "")
        if isinstance(text, list):
            text = "; ".join(map(_validation_error, text))
        return str(text)[:_MESSAGE_CHARACTERS]
    return body[:_MESSAGE_CHARACTERS].decode("utf-8", "replace").strip()


def _validation_error(found: Any) -> str:
    """Format one entry of FastAPI's list of validation errors."""
    if not isinstance(found, dict):
        return str(found)
    place = ".".join(map(str, found.get("loc") or ()))
    return f"{place}: {found.get('msg')}" if place else str(found.get("msg"))


# Anthropic's HTTP status for an overloaded server, as opposed to a client that exceeds its own limit.
_OVERLOADED_STATUS = 529
_OVERLOADED = frozenset(
    {
        *(Outcome.REJECTED_QUEUE_FULL, Outcome.REJECTED_DEADLINE_UNMEETABLE),
        *(Outcome.REJECTED_NO_REPLICA, Outcome.REJECTED_STOPPING),
    }
)
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}


class ClientApi(Protocol):
    """An API that clients use."""

    def status(self, rejection: RequestRejected) -> int:
        """Return the HTTP status of a rejection."""
        ...

    def error(self, rejection: RequestRejected) -> bytes:
        """Return the body of a rejection."""
        ...

    def error_event(self, rejection: RequestRejected) -> bytes:
        """Return the rejection as a server-sent event, for a stream that has begun."""
        ...

    def body_event(self, status: int, body: bytes) -> bytes:
        """Return an engine's non-streamed answer as a server-sent event."""
        ...

    def engine_answer(
        self, status: int, path: str, headers: HeaderList, body: bytes
    ) -> tuple[HeaderList, bytes]:
        """Return headers and body of an answer of the route `path`, with errors in the API's shape."""
        ...

    def id_lines(self, request_id: str) -> bytes:
        """Return the header lines that contain the request id."""
        ...


class OpenAIApi:
    """OpenAI's API."""

    def status(self, rejection: RequestRejected) -> int:
        """Return the rejection's HTTP status."""
        return rejection.status

    def error(self, rejection: RequestRejected) -> bytes:
        """Return the rejection's body."""
        return rejection.body()

    def error_event(self, rejection: RequestRejected) -> bytes:
        """Return an unnamed event."""
        return data_event(rejection.body())

    def body_event(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 - errors have the same form
        """Return an unnamed event."""
        return data_event(body)

    def engine_answer(
        self, status: int, path: str, headers: HeaderList, body: bytes
    ) -> tuple[HeaderList, bytes]:
        """Convert errors of another shape."""
        return in_openai_shape(status, path, headers, body)

    def id_lines(self, request_id: str) -> bytes:
        """Return `x-request-id`."""
        return b"x-request-id: %b\r\n" % request_id.encode()


class AnthropicApi:
    """Anthropic's API."""

    def status(self, rejection: RequestRejected) -> int:
        """Return the status; 529 instead of 429 for a full queue, as 429 is for the client's own limits."""
        busy = rejection.outcome in _OVERLOADED and rejection.status == 429
        return _OVERLOADED_STATUS if busy else rejection.status

    def error(self, rejection: RequestRejected) -> bytes:
        """Return the error without param and code, which the API does not have."""
        kind = "overloaded_error" if rejection.outcome in _OVERLOADED else _type_of(rejection.status)
        return _error(kind, rejection.message)

    def error_event(self, rejection: RequestRejected) -> bytes:
        """Return an event named `error`."""
        return self.body_event(400, self.error(rejection))

    def body_event(self, status: int, body: bytes) -> bytes:
        """Return an event, named `error` for errors."""
        return b"event: error\n" + data_event(body) if status >= 400 else data_event(body)

    def engine_answer(
        self, status: int, path: str, headers: HeaderList, body: bytes
    ) -> tuple[HeaderList, bytes]:
        """Convert errors; the engine's message is preserved."""
        if status < 400:
            return headers, body
        others = [pair for pair in headers if pair[0] != b"content-type"]
        return [JSON_TYPE, *others], _error(_type_of(status), error_message(status, path, body))

    def id_lines(self, request_id: str) -> bytes:
        """Return `x-request-id`, and `request-id` for Anthropic's SDKs."""
        return b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id.encode(), request_id.encode())


OPENAI = OpenAIApi()
ANTHROPIC = AnthropicApi()


def _type_of(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def _error(kind: str, message: str) -> bytes:
    return encode({"type": "error", "error": {"type": kind, "message": message}})


class ClientGone(ServeAppError):  # noqa: N818 - a client's choice, not an error
    """The client disconnected, or was disconnected because it stopped reading."""


class ClientExchange(Protocol):
    """A server's side of a request; the meaning of all members is that of `http_server.Exchange`."""

    method: str
    path: str
    query: bytes
    headers: HeaderList
    caller: object | None
    more_body: bool
    disconnected: bool
    status: int
    added_headers: HeaderList
    on_disconnect: Callable[[], None] | None
    on_writable: Callable[[], None] | None

    @property
    def client(self) -> tuple[str, int] | None:
        """Address of the client; None if it has none."""
        ...

    @property
    def is_choked(self) -> bool:
        """True while the client does not read what was written."""
        ...

    def run(self, work: Coroutine[None, None, None]) -> object:
        """Serve the request in a task."""
        ...

    def fail(self) -> None:
        """Respond with an internal error or, if the response has started, close the connection."""
        ...

    def take_body(self) -> bytes:
        """Return the whole body, if `more_body` is False."""
        ...

    async def receive(self) -> bytes | None:
        """Return the next piece of the body; None after a disconnect."""
        ...

    async def drain(self) -> None:
        """Wait while the client does not read what was written."""
        ...

    def start_response(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes = b"") -> None:
        """Start the response."""
        ...

    def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
        """Write a piece of a response that has begun; return whether there is room for more."""
        ...
