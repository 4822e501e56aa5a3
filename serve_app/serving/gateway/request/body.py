"""Bodies of requests: limits on their structure and memory, fields that are added, and multipart forms.

- `check_structure`: limits on the structure of a body, checked before parsing.
- `BodyBudget`: a bound on the memory of all bodies.
- `append_fields`: adds fields to a JSON body.
- `FormParser`: multipart forms, parsed while they arrive, by python-multipart, which Starlette, and therefore
  vLLM, applies to the same bodies.

`check_structure`. A parser creates an object for every `{}` and every `""`: 2 MiB of them become a gigabyte
and block the gateway for seconds. Legitimate large bodies consist of long texts, media and token ids, which
are cheap. The limits therefore apply to the numbers of objects, strings and elements.

Counting is linear in the size, and exact only near the limits. First numpy counts brackets, quotes and commas
in all bytes, an upper bound for those outside strings; bodies too short for a limit are not counted. Only if
a bound exceeds its limit are strings removed and the rest counted. Depth needs no check, because parsers stop
at a few hundred levels.

`BodyBudget`. A body stays in memory until it cannot be sent again: its answer has begun, or the request is
over. Many large bodies may be queued at once, so their total is bounded. Beyond it, requests are rejected
with 503 and a `Retry-After` from the rate at which bodies are released. The last quarter of the budget is
reserved for small bodies, so that a few clients with large ones do not lock others out.

`append_fields`. Fields are spliced into a JSON body before its closing brace, without re-encoding. A field
that the body has already then occurs twice, and JSON readers use the last one (Python's, pydantic's and
msgspec's do). All other bytes reach the engine as the client wrote them.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.core.routing.prefill_cost import DecayingRate
from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRejected

# Objects and arrays. A message with a tool call has five, a tool's definition about twenty.
MAX_CONTAINERS = 50_000
# Texts and field names.
MAX_STRINGS = 250_000
# A prompt of token ids has one element per token; contexts end at one or two million.
MAX_ELEMENTS = 2_500_000
# Smaller bodies are not checked; parsing them takes 5 ms at most.
UNCHECKED_BYTES = 64 * 1024

# Limit on brackets, quotes and commas for a body that is mostly long texts. Half a MiB with this many, mostly
# in empty messages, is parsed in 3 ms.
_PLAIN_SIGNS = 10_000

_STRUCTURE = bytes(byte for byte in range(256) if byte not in b"[{,")
# Counted in chunks, so that intermediate results stay in the processor's cache.
_COUNTED_BYTES = 256 * 1024
# Sets the one bit that differs between `[` and `{`.
_BRACKETS = 0x20


def check_structure(body: bytes) -> None:
    """Raise `RequestRejected` for too many objects, strings or elements, which would take long to parse."""
    if len(body) <= UNCHECKED_BYTES:
        return
    # A string has two quotes, and elements have a comma between them.
    if len(body) > 2 * MAX_STRINGS:
        quotes = _count(body, ord('"'))
        if quotes > 2 * MAX_STRINGS and quotes - body.count(b'\\"') > 2 * MAX_STRINGS:
            raise _too_many("strings", MAX_STRINGS)
    containers = _count(body, ord("{"), _BRACKETS)
    commas = _count(body, ord(",")) if len(body) > MAX_ELEMENTS else 0
    if containers <= MAX_CONTAINERS and commas <= MAX_ELEMENTS:
        return
    structure = _outside_strings(body)
    commas = structure.count(b",")
    if len(structure) - commas > MAX_CONTAINERS:
        raise _too_many("objects and arrays", MAX_CONTAINERS)
    if commas > MAX_ELEMENTS:
        raise _too_many("elements", MAX_ELEMENTS)


def is_plain(body: bytes) -> bool:
    """Return whether a body is mostly long texts, which take one or two nanoseconds per byte to parse."""
    signs = _count(body, ord("{"), _BRACKETS)
    return signs + _count(body, ord('"')) + _count(body, ord(",")) <= _PLAIN_SIGNS


def _count(body: bytes, byte: int, bits: int = 0) -> int:
    """Count the bytes that equal `byte` after setting `bits` in them."""
    data = np.frombuffer(body, np.uint8)
    found = 0
    for start in range(0, len(data), _COUNTED_BYTES):
        piece = data[start : start + _COUNTED_BYTES]
        found += int(np.count_nonzero((piece | np.uint8(bits) if bits else piece) == byte))
    return found


def _outside_strings(body: bytes) -> bytes:
    """Return the opening brackets and commas of a body that are outside strings."""
    if b"\\" in body:
        # This order leaves at most one backslash before a quote.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = body.split(b'"')[::2]
    return b"".join(pieces).translate(None, _STRUCTURE)


def _too_many(what: str, limit: int) -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_INVALID,
        f"the body has more than {limit:,} {what}: send fewer, or several requests",
        code="body_too_complex",
    )


# -- memory -----------------------------------------------------------------------------------------------

# Limit of a small body, as ordinary chats have.
_SMALL_BYTES = 256 * 1024
_SHARE_OF_LARGE = 0.75
_RATE_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class HeldBody:
    """One request body in memory.

    Attributes:
        data: its bytes; empty after release.
        received_at: arrival of its last byte, on the monotonic clock.
        form_model: place of the model's name in a form, to which no fields can be added; None for JSON.
    """

    __slots__ = ("_budget", "_held_bytes", "data", "form_model", "received_at")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self._held_bytes = 0
        self.data: bytes = b""
        self.received_at = 0.0
        self.form_model: slice | None = None

    def grow(self, size: int) -> None:
        """Reserve memory for bytes that have arrived.

        Raises:
            RequestRejected: the budget is exhausted.
        """
        self._budget.take(size, total=self._held_bytes + size)
        self._held_bytes += size

    def release(self) -> None:
        """Release the body. Idempotent."""
        if self._held_bytes:
            self._budget.give_back(self._held_bytes)
            self._held_bytes, self.data = 0, b""


class BodyBudget:
    """Memory budget for the bodies of one gateway.

    Attributes:
        held_bytes: total of all bodies in memory.
        max_bytes: limit of the total.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._released: DecayingRate | None = None
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held_bytes:,} of {self.max_bytes:,} bytes>"

    def take(self, size: int, *, total: int) -> None:
        """Reserve `size` bytes for a body of `total` bytes so far.

        Raises:
            RequestRejected: the budget is exhausted.
        """
        limit = self.max_bytes if total <= _SMALL_BYTES else int(self.max_bytes * _SHARE_OF_LARGE)
        if self.held_bytes + size > limit:
            raise RequestRejected(
                Outcome.REJECTED_QUEUE_FULL,
                f"the body memory of this gateway is full ({self.held_bytes:,} bytes of queued requests): "
                "retry later, or raise gateway.advanced.max_held_body_bytes",
                code="body_memory_full",
                status=503,
                retry_after_s=self._room_in_s(self.held_bytes + size - limit),
            )
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """Release `size` bytes."""
        self.held_bytes -= size
        now = asyncio.get_running_loop().time()
        if self._released is None:
            self._released = DecayingRate(_RATE_S, now)
        self._released.add(float(size), now)

    def _room_in_s(self, missing_bytes: int) -> float:
        now = asyncio.get_running_loop().time()
        per_s = self._released.per_s(now) if self._released is not None else 0.0
        return min(max(missing_bytes / per_s, _MIN_RETRY_S), _MAX_RETRY_S) if per_s else _MIN_RETRY_S


NO_BODY = HeldBody(BodyBudget(0))
"""The body of a request that has not been read."""


# -- splicing ---------------------------------------------------------------------------------------------


def body_for(
    held: HeldBody,
    model: str | None,
    priority: int | None,
    response_id: str | None,
    continuation: list[bytes],
) -> bytes:
    """Return a body with the fields of one attempt.

    Args:
        model: name for the engine; None for that in the body.
        priority: for an engine with priority scheduling; None for others.
        response_id: name for the response; None if the engine chooses it.
        continuation: fields of `ContinuableAssembly.begin_attempt`.
    """
    if (place := held.form_model) is not None:
        form = held.data
        return form if model is None else form[: place.start] + model.encode() + form[place.stop :]
    fields = [*continuation]
    if model is not None:
        fields.append(model_field(model))
    if priority is not None:
        fields.append(priority_field(priority))
    if response_id is not None:
        fields.append(response_id_field(response_id))
    return append_fields(held.data, fields)


# vLLM's default for bodies without the field, and the only value that every engine accepts.
NO_PRIORITY = 0

_WITH_USAGE = b'"stream_options":{"include_usage":true}'


# Requests a stream for an answer that the gateway assembles.
AS_STREAM = b'"stream":true,' + _WITH_USAGE


class _OptionsOnly(msgspec.Struct):
    stream_options: dict[str, msgspec.Raw] | None = None


_options_decoder = msgspec.json.Decoder(_OptionsOnly)


def usage_field(body: bytes, *, has_stream_options: bool) -> bytes:
    """Return the field that requests usage in a stream, with the client's other stream options.

    `continuous_usage_stats` is removed. Without `include_usage`, which the client omitted, it has no effect;
    with it, every event would carry usage.
    """
    if not has_stream_options:
        return _WITH_USAGE
    options = _options_decoder.decode(body).stream_options or {}
    options.pop("continuous_usage_stats", None)
    wanted: dict[str, Any] = {**options, "include_usage": True}
    return b'"stream_options":' + msgspec.json.encode(wanted)


def priority_field(value: int) -> bytes:
    """Return the field by which an engine with priority scheduling orders requests; lower is sooner."""
    return b'"priority":%d' % value


def model_field(name: str) -> bytes:
    """Return the field that names the model."""
    return b'"model":' + msgspec.json.encode(name)


def salt_field(salt: str) -> bytes:
    """Return the field that separates a request's blocks in an engine's prefix cache."""
    return b'"cache_salt":' + msgspec.json.encode(salt)


def response_id_field(response_id: str) -> bytes:
    """Return the field by which vLLM names a response; a client's own could overwrite another response."""
    return b'"request_id":' + msgspec.json.encode(response_id)


def append_fields(body: bytes, fields: list[bytes]) -> bytes:
    """Return a JSON object with fields appended.

    Args:
        body: an object with at least one field, as checked by the parser.
        fields: each as `"name":value`.

    Raises:
        RequestRejected: the body does not end with a brace.
    """
    if not fields:
        return body
    end = len(body) - 1
    # Skip trailing white space by index, because rstrip would copy the body.
    while end >= 0 and body[end] in b" \t\r\n":
        end -= 1
    if end < 0 or body[end] != ord("}"):
        raise RequestRejected(Outcome.REJECTED_INVALID, "the body must be one JSON object")
    return b"".join((memoryview(body)[:end], b",", b",".join(fields), b"}"))


# -- forms ------------------------------------------------------------------------------------------------


class FormReader(Protocol):
    """Receiver of the parts of a form. Its methods raise `FormParserError` for a form that it rejects."""

    def begin(self, name: str, filename: str | None) -> None:
        """Begin a field; `filename` is None if it is no file."""
        ...

    def add(self, data: bytes, start: int, end: int) -> None:
        """Add a piece of the current field's value, a slice of the data that were fed."""
        ...


class FormParser:
    """Parser of a form.

    Args:
        content_type: of the request; has the boundary of the parts.
        max_parts: maximum number of fields.

    Raises:
        RequestRejected: the body is not such a form.
    """

    def __init__(self, content_type: bytes, reader: FormReader, max_parts: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise no_form("content-type must be multipart/form-data with a boundary")
        # Servers decode field names with this charset, so another one could change the name of a field.
        charset = options.get(b"charset", b"utf-8")
        if charset.lower() not in (b"utf-8", b"utf8"):
            raise no_form(f"its charset must be utf-8 or omitted, got {charset[:40].decode('latin-1')!r}")
        self._reader, self._max_parts = reader, max_parts
        self._header = (bytearray(), bytearray())
        self._parts = 0
        self._is_named = self._ended = False
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._add,
            "on_end": self._end,
        }
        try:
            # Its type has one key per callback.
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise no_form(str(error)) from error

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise no_form(str(error)) from error

    def finish(self) -> None:
        """Check that the form is complete."""
        if not self._ended:
            raise no_form("the form is truncated")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > self._max_parts:
            raise FormParserError(f"a form has at most {self._max_parts} fields here")
        self._is_named = False

    def _end_header(self) -> None:
        name, value = self._header
        self._header = (bytearray(), bytearray())
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            filename = options.get(b"filename")
            self._is_named = True
            self._reader.begin(
                options.get(b"name", b"").decode("utf-8", "replace"),
                None if filename is None else filename.decode("utf-8", "replace"),
            )

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_named:
            self._reader.add(data, start, end)

    def _end(self) -> None:
        self._ended = True


def no_form(problem: str) -> RequestRejected:
    """Return the rejection of a body that is not a form."""
    return RequestRejected(
        Outcome.REJECTED_INVALID, f"the body is not a form: {problem}. Send multipart/form-data"
    )
