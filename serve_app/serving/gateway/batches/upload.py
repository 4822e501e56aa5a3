"""Uploads: forms with a file that is written and checked while it arrives, so its length needs no memory."""

from collections.abc import Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRejected

_MAX_FIELDS, _MAX_FIELD_BYTES = 20, 4096
_FILE = "file"


class UploadForm:
    """Parser of the form of an upload.

    Args:
        content_type: of the request; has the boundary of the parts.

    Attributes:
        fields: the values of the fields, except the file.
        filename: name of the file; None until it arrives.

    Raises:
        RequestRejected: the body is not such a form.
    """

    def __init__(self, content_type: bytes) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise _no_form("content-type must be multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._data = bytearray()
        self._name = ""
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._parts = 0
        self._ended = False
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            # Its type has one key per callback.
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise _no_form(str(error)) from error

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body, and return the bytes of the file in them."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _no_form(str(error)) from error
        found, self._data = bytes(self._data), bytearray()
        return found

    def finish(self) -> None:
        """Check that the form is complete and has a file."""
        if not self._ended:
            raise _no_form("the form is truncated")
        if self.filename is None:
            raise _no_form("the field file is missing")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_FIELDS:
            raise FormParserError(f"it has more than {_MAX_FIELDS} fields")
        self._name, self._value = "", bytearray()

    def _end_header(self) -> None:
        name, value = self._header
        self._header = (bytearray(), bytearray())
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(bytes(value))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == _FILE:
            if self.filename is not None:
                raise FormParserError("the field file occurs twice")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or _FILE

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._data += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise FormParserError(f"the field {self._name[:40]} is longer than {_MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


def _no_form(problem: str) -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_INVALID, f"the body is not an upload: {problem}. Send multipart/form-data"
    )
