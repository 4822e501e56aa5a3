"""Interpretation of an engine's answer to a granted request: pass it on, or try another replica.

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

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.engines.adapters.server import TYPE_OF_LLAMA_CPP, is_too_long
from serve_app.errors import Outcome
from serve_app.serving.gateway.upstream.response import HeaderList, UpstreamError

DRAINING_HEADER = b"x-replica-draining"
# vLLM's errors for all requests that were running when its core process died.
_DEAD = re.compile(r"EngineCore encountered an issue|EngineDeadError")
_MESSAGE_CHARACTERS = 500


class TooLongError(UpstreamError):
    """The engine's context limit, which it may report in a field, is below the request's length."""

    def __init__(self, message: str, param: str | None, context_tokens: int | None = None) -> None:
        # The scheduler parses the limit from this message (`rejections`).
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
