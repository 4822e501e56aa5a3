"""Errors of engines in OpenAI's shape: SDKs show nothing of any other.

vLLM writes its own errors so, but its web framework has another shape for what it refuses by itself: a route
that the model does not have is `{"detail":"Not Found"}`. Servers of other makes write what they like.
"""

from typing import Any

import msgspec

from serve_app.serving.gateway.answer.responses import JSON_TYPE, ErrorDetail, HeaderList, encode

_MESSAGE_CHARACTERS = 500
_CODES = {404: "not_found", 405: "method_not_allowed"}
_NOT_FOUND = "Not Found"


def in_openai_shape(status: int, path: str, headers: HeaderList, body: bytes) -> tuple[HeaderList, bytes]:
    """Headers and body of an engine's answer; those of an error in another shape than OpenAI's are replaced.

    Args:
        path: which route of the engine answered.
    """
    if status < 400:
        return headers, body
    found = _parsed(body)
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return headers, body
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = found.get("param") if isinstance(found, dict) else None
    detail = ErrorDetail(
        _words(status, path, found, body),
        kind,
        param if isinstance(param, str) else None,
        _CODES.get(status),
    )
    others = [pair for pair in headers if pair[0] != b"content-type"]
    return [JSON_TYPE, *others], encode({"error": detail})


def error_words(status: int, path: str, body: bytes) -> str:
    """What an engine's error says, in whatever shape."""
    found = _parsed(body)
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    return _words(status, path, found, body)


def _words(status: int, path: str, found: Any, body: bytes) -> str:
    said = _said(found, body)
    if status == 404 and said in ("", _NOT_FOUND):
        return f"the engine of this model does not serve {path}"
    return said or f"the engine answered {status} without a message"


def _parsed(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None


def _said(found: Any, body: bytes) -> str:
    """The engine's own words, wherever it put them."""
    if isinstance(found, dict):
        words = next((found[name] for name in ("message", "detail", "error") if found.get(name)), "")
        if isinstance(words, list):
            words = "; ".join(map(_complaint, words))
        return str(words)[:_MESSAGE_CHARACTERS]
    return body[:_MESSAGE_CHARACTERS].decode("utf-8", "replace").strip()


def _complaint(found: Any) -> str:
    """One of the complaints that FastAPI lists of a body."""
    if not isinstance(found, dict):
        return str(found)
    place = ".".join(map(str, found.get("loc") or ()))
    return f"{place}: {found.get('msg')}" if place else str(found.get("msg"))
