"""Input files: one request per line.

    {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …, "messages": …}}

A file is checked while it is uploaded, so that a mistake is known before anything runs. Whatever depends on
the model, such as its name or the length of a prompt, is checked when the request runs, and is the error of
that request only.
"""

from hashlib import blake2b
from typing import IO

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.batches.contents import Contents
from serve_app.serving.gateway.request.endpoints import SCHEDULED

_MAX_ID_CHARACTERS = 512
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Lines that are read at once.
_BLOCK_BYTES = 256 * 1024


class _Body(msgspec.Struct, gc=False):
    model: str
    stream: bool | None = None


class _Request(msgspec.Struct, gc=False):
    custom_id: str
    url: str
    body: _Body
    method: str = "POST"


class BatchRequest(msgspec.Struct):
    """A request of a batch; `line` is its line in the input file, from 1."""

    custom_id: str
    url: str
    body: msgspec.Raw
    line: int = 0


class InputChecker:
    """Checker of an input file while it arrives.

    Args:
        max_requests: limit of requests in the file.
        max_line_bytes: limit of the length of each.

    Attributes:
        requests: number of requests so far.
        first_lines: line of the first request to each endpoint.
    """

    def __init__(self, max_requests: int, max_line_bytes: int) -> None:
        self.requests = 0
        self.first_lines: dict[str, int] = {}
        self._max_requests, self._max_line_bytes = max_requests, max_line_bytes
        self._decoder = msgspec.json.Decoder(_Request)
        self._ids: set[bytes] = set()
        self._rest = b""
        self._line = 0

    def feed(self, data: bytes) -> None:
        """Check the next bytes.

        Raises:
            RequestRejected: a line is not a request; the message has its number.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._check(line)
        if len(self._rest) > self._max_line_bytes:
            self._line += 1
            raise self._too_long()

    def finish(self) -> None:
        """Check the last line.

        Raises:
            RequestRejected: it is not a request, or the file has no request.
        """
        self._check(self._rest)
        self._rest = b""
        if not self.requests:
            raise invalid_file("empty_file", "the file has no request: write one per line")

    def _check(self, line: bytes) -> None:
        self._line += 1
        if self._line == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip():
            return
        if len(line) > self._max_line_bytes:
            raise self._too_long()
        request = self._decoded(line)
        self.requests += 1
        if self.requests > self._max_requests:
            raise self._error(
                "too_many_requests",
                f"a batch has at most {self._max_requests:,} requests: split the file",
            )
        if request.method != "POST":
            raise self._error("invalid_method", f"method must be POST, got {request.method[:20]!r}")
        if request.url not in SCHEDULED:
            known = ", ".join(SCHEDULED)
            raise self._error("invalid_url", f"url must be one of {known}; got {request.url[:100]!r}")
        if request.body.stream:
            raise self._error("invalid_request", "body.stream must be false or omitted in a batch")
        if not 0 < len(request.custom_id) <= _MAX_ID_CHARACTERS:
            raise self._error(
                "invalid_custom_id", f"custom_id must have 1 to {_MAX_ID_CHARACTERS} characters"
            )
        # A digest takes less memory than a long id.
        digest = blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            raise self._error("duplicate_custom_id", f"custom_id {request.custom_id[:100]!r} occurs twice")
        self._ids.add(digest)
        self.first_lines.setdefault(request.url, self._line)

    def _decoded(self, line: bytes) -> _Request:
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise self._error("invalid_request", str(error)) from error
        except (ValueError, RecursionError) as error:
            raise self._error("invalid_json_line", f"not JSON: {error}") from error

    def _too_long(self) -> RequestRejected:
        return self._error("line_too_long", f"longer than {self._max_line_bytes:,} bytes")

    def _error(self, code: str, problem: str) -> RequestRejected:
        return invalid_file(code, f"line {self._line}: {problem}")


class InputReader:
    """Reader of the requests of a checked file; blocks."""

    def __init__(self, contents: Contents, file_id: str) -> None:
        self._contents, self._file_id = contents, file_id
        self._file: IO[bytes] | None = None
        # Lines of which the requests were returned.
        self._returned = 0
        self._decoder = msgspec.json.Decoder(BatchRequest)

    def next(self) -> list[BatchRequest]:
        """Return the next requests in the order of the file; empty at its end.

        After an error the file is opened again, and the next call returns the same requests.

        Raises:
            StoreError: the file cannot be read.
            FileNotFoundError: there is no such file.
        """
        try:
            with self._contents.errors(self._file_id):
                return self._next()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _next(self) -> list[BatchRequest]:
        if self._file is None:
            self._file = self._contents.open(self._file_id)
            for _ in range(self._returned):
                self._file.readline()
        requests: list[BatchRequest] = []
        number = self._returned
        while not requests and (lines := self._file.readlines(_BLOCK_BYTES)):
            for line in lines:
                number += 1
                written = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if written.strip():
                    request = self._decoder.decode(written)
                    request.line = number
                    requests.append(request)
        self._returned = number
        return requests


def invalid_file(code: str, message: str) -> RequestRejected:
    """Return the rejection of an input file."""
    return RequestRejected(Outcome.REJECTED_INVALID, message, code=code, param="file")
