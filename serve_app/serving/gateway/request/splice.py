"""Splicing: fields added to a JSON body without parsing and writing it again.

A field is appended before the closing brace. Where the body has it already there are then two, and JSON
readers take the last (Python's, pydantic's and msgspec's do), so the rest of the body reaches the engine
byte by byte as the client wrote it.
"""

from typing import Any

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRefused

# What vLLM takes a body without the field for, and the only value that every engine accepts.
NO_PRIORITY = 0

_WITH_USAGE = b'"stream_options":{"include_usage":true}'


# Makes a stream of an answer that was wanted in one piece, for the gateway to assemble.
AS_STREAM = b'"stream":true,' + _WITH_USAGE


class _OptionsOnly(msgspec.Struct):
    stream_options: dict[str, msgspec.Raw] | None = None


_options_decoder = msgspec.json.Decoder(_OptionsOnly)


def usage_field(body: bytes, *, has_stream_options: bool) -> bytes:
    """The field that asks an engine for a stream's usage; keeps the client's other stream options.

    But for `continuous_usage_stats`: without `include_usage`, which the client left out, it does nothing, and
    with it every event would carry usage that nobody asked for.
    """
    if not has_stream_options:
        return _WITH_USAGE
    options = _options_decoder.decode(body).stream_options or {}
    options.pop("continuous_usage_stats", None)
    wanted: dict[str, Any] = {**options, "include_usage": True}
    return b'"stream_options":' + msgspec.json.encode(wanted)


def priority_field(value: int) -> bytes:
    """The field that an engine with priority scheduling orders by; lower is served first."""
    return b'"priority":%d' % value


def salt_field(salt: str) -> bytes:
    """The field that keeps a request's blocks apart in an engine's prefix cache."""
    return b'"cache_salt":' + msgspec.json.encode(salt)


def response_id_field(response_id: str) -> bytes:
    """The field by which vLLM names a response; a client's own would let it overwrite another's."""
    return b'"request_id":' + msgspec.json.encode(response_id)


def append_fields(body: bytes, fields: list[bytes]) -> bytes:
    """A JSON object with more fields at its end.

    Args:
        body: an object with at least one field, checked by the parser before.
        fields: each as `"name":value`.

    Raises:
        RequestRefused: the body does not end with a brace.
    """
    if not fields:
        return body
    end = len(body) - 1
    # White space may follow the object. Stepping back copies nothing, unlike rstrip.
    while end >= 0 and body[end] in b" \t\r\n":
        end -= 1
    if end < 0 or body[end] != ord("}"):
        raise RequestRefused(Outcome.REJECTED_INVALID, "the body must be one JSON object")
    return b"".join((memoryview(body)[:end], b",", b",".join(fields), b"}"))
