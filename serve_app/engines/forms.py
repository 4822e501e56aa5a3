"""Forms with a file, as clients send audio: read as far as their fields and the beginning of the file.

The file's own bytes are counted and not copied, however many there are. The parser is python-multipart's,
with which Starlette, and so vLLM, reads the same bodies.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Enough for the head of a sound file.
_HEAD_BYTES = 64
_MOST_PARTS = 100
_MOST_FIELD_BYTES = 256 * 1024


class FormError(ValueError):
    """A body that is no form, or one with too many or too long fields."""


@dataclass(slots=True)
class UploadedFile:
    """The file of a form.

    Attributes:
        size_bytes: of all of it.
        head: how it begins.
    """

    size_bytes: int = 0
    head: bytes = b""


@dataclass(slots=True)
class Form:
    """A form.

    Attributes:
        fields: by name; of two with the same name the last.
        files: likewise.
        repeated: names that occur more than once. Of those some servers take the first, and some the last.
    """

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)


def read_form(body: bytes, content_type: bytes) -> Form:
    """The form in a body.

    Raises:
        FormError: there is none, or it is not complete.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise FormError("content-type must be multipart/form-data with a boundary")
    # Servers decode the names of fields by it, so that a field would have another name there.
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise FormError(f"its charset must be utf-8 or left out, got {charset[:40].decode('latin-1')!r}")
    reader = _FormReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise FormError(str(error)) from error
    if not reader.ended:
        raise FormError("the form does not end")
    return reader.form


class _FormReader:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.form = Form()
        self.ended = False
        self._parts = 0
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._file: UploadedFile | None = None
        self._value = bytearray()

    def callbacks(self) -> "MultipartCallbacks":
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise FormError(f"a form has at most {_MOST_PARTS} fields here")
        self._headers, self._header, self._value, self._file = {}, [b"", b""], bytearray(), None

    def _add_to_header(self, place: int, piece: bytes) -> None:
        self._header[place] += piece

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.form.fields or self._name in self.form.files:
            self.form.repeated.add(self._name)
        if b"filename" in options:
            self._file = self.form.files[self._name] = UploadedFile()

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._file is None:
            self._value += data[start:end]
            if len(self._value) > _MOST_FIELD_BYTES:
                raise FormError(f"the field {self._name[:100]!r} is longer than {_MOST_FIELD_BYTES} bytes")
            return
        self._file.size_bytes += end - start
        if len(self._file.head) < _HEAD_BYTES:
            self._file.head += data[start : min(end, start + _HEAD_BYTES)]

    def _end(self) -> None:
        if self._file is None:
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.ended = True


def duration_s(upload: UploadedFile) -> float:
    """About how long a sound lasts, in seconds.

    A WAV file tells its bytes per second. Others are compressed, and taken for 32 kbit/s: less than most
    have, so that the estimate rather errs high.
    """
    head = upload.head
    is_wav = head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt "
    per_s = int.from_bytes(head[28:32], "little") if is_wav else 0
    return upload.size_bytes / (per_s or _COMPRESSED_BYTES_PER_S)


_COMPRESSED_BYTES_PER_S = 4_000
