"""HTTP requests to the emulated engine: responses, event streams, and errors in vLLM's format."""

import uuid
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from serve_app.engines.engine import Receive, Scope, Send
from serve_app.errors import ServeAppError

encode = msgspec.json.encode

_EVENTS = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request whose body has been read."""

    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    def request_id(self, prefix: str) -> str:
        """Return the client's `x-request-id` or a new id, prefixed with the kind of the answer."""
        for name, value in self.scope["headers"]:
            if name == b"x-request-id":
                return f"{prefix}-{value.decode('latin-1')}"
        return f"{prefix}-{uuid.uuid4().hex}"

    async def begin_events(self) -> None:
        """Start a stream of server-sent events."""
        headers = [(b"content-type", _EVENTS), (b"cache-control", b"no-cache")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_events(self, body: bytes, *, more: bool) -> None:
        """Send the next events of a stream; `more` is False for the last."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})


class ApiError(ServeAppError):
    """An error response.

    Args:
        status: HTTP status, also the `code` of the error object, as in vLLM.
        kind: `type` of the error object.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body = encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """Return the error 400 for an invalid request."""
    return ApiError(400, message, kind="BadRequestError", param=param)


def not_emulated(field: str) -> ApiError:
    """Return the error 400 for a field that would change the answer in a way that is not emulated."""
    return invalid(f"{field} is not supported by the emulated engine: use a real engine", param=field)


def no_such_route(status: int) -> ApiError:
    """Return the error 404 or 405 for a path or method that is not served."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase, kind=phrase)


def engine_failed() -> ApiError:
    """Return the error 500 for an engine that stopped while it processed the request."""
    return ApiError(500, "EngineCore encountered an issue.", kind="InternalServerError")
