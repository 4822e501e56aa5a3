"""The APIs of clients, as far as the gateway writes in them: errors, and the request-id header.

OpenAI's errors are `{"error": {"message", "type", "param", "code"}}`. Anthropic's are `{"type": "error",
"error": {"type", "message"}}` with other types; in a stream they are an event named `error`. vLLM uses its
own types there, and OpenAI's shape for some errors; Anthropic's SDKs accept neither.

Engine errors are converted to OpenAI's shape, because SDKs display no other. vLLM's own errors have it, but
not those of its web framework: a route that the model does not have is `{"detail":"Not Found"}`. Other
servers use further shapes.
"""

from typing import Any, Protocol

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import (
    JSON_TYPE,
    ErrorDetail,
    RequestRejected,
    data_event,
    encode,
)
from serve_app.serving.gateway.upstream.response import HeaderList

_MESSAGE_CHARACTERS = 500
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

    def id_headers(self, request_id: str) -> HeaderList:
        """Return the headers that contain the request id."""
        ...

    def id_lines(self, request_id: str) -> bytes:
        """Return the same as header lines."""
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

    def id_headers(self, request_id: str) -> HeaderList:
        """Return `x-request-id`."""
        return [(b"x-request-id", request_id.encode())]

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

    def id_headers(self, request_id: str) -> HeaderList:
        """Return `x-request-id`, and `request-id` for Anthropic's SDKs."""
        return [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]

    def id_lines(self, request_id: str) -> bytes:
        """Return both as lines."""
        return b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id.encode(), request_id.encode())


OPENAI = OpenAIApi()
ANTHROPIC = AnthropicApi()


def _type_of(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def _error(kind: str, message: str) -> bytes:
    return encode({"type": "error", "error": {"type": kind, "message": message}})
