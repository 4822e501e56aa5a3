"""Multipart forms, parsed while they arrive.

The parser is python-multipart, which Starlette, and therefore vLLM, applies to the same bodies.
"""

from collections.abc import Callable
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRejected


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
