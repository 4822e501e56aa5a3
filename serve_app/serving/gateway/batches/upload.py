"""Uploads: forms with a file that is written and checked while it arrives, so its length needs no memory."""

from python_multipart.exceptions import FormParserError

from serve_app.serving.gateway.request.form import FormParser, no_form

_MAX_FIELDS, _MAX_FIELD_BYTES = 20, 4096
_FILE = "file"


class UploadForm:
    """The form of an upload.

    Args:
        content_type: of the request; has the boundary of the parts.

    Attributes:
        filename: name of the file; None until it arrives.

    Raises:
        RequestRejected: the body is not such a form.
    """

    def __init__(self, content_type: bytes) -> None:
        self.filename: str | None = None
        self._values: dict[str, bytearray] = {}
        self._name = ""
        self._data = bytearray()
        self._parser = FormParser(content_type, self, _MAX_FIELDS)

    @property
    def fields(self) -> dict[str, str]:
        """The values of the fields, except the file."""
        return {name: value.decode("utf-8", "replace") for name, value in self._values.items()}

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body, and return the bytes of the file in them."""
        self._parser.feed(data)
        found, self._data = bytes(self._data), bytearray()
        return found

    def finish(self) -> None:
        """Check that the form is complete and has a file."""
        self._parser.finish()
        if self.filename is None:
            raise no_form("the field file is missing")

    def begin(self, name: str, filename: str | None) -> None:
        """Begin a field."""
        self._name = name
        if name != _FILE:
            self._values[name] = bytearray()
            return
        if self.filename is not None:
            raise FormParserError("the field file occurs twice")
        self.filename = filename or _FILE

    def add(self, data: bytes, start: int, end: int) -> None:
        """Add a piece of the file or of a field."""
        if self._name == _FILE:
            self._data += data[start:end]
            return
        value = self._values[self._name]
        value += data[start:end]
        if len(value) > _MAX_FIELD_BYTES:
            raise FormParserError(f"the field {self._name[:40]} is longer than {_MAX_FIELD_BYTES} bytes")
