"""HTTP client of the commands: one function on top of the standard library, without an event loop.

Commands must start quickly, and an asynchronous client takes a third of a second to import. Gateways and
endpoint watchers use `serve_app.serving.gateway.upstream`.
"""

import http.client
import json
import secrets
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from serve_app.errors import ServeAppError

_TIMEOUT_S = 10.0
_PIECE_BYTES = 1024 * 1024


class ConnectionFailedError(ServeAppError):
    """The server cannot be reached. The message is the reason only."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response of any status, with header names in lower case."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """True if the status is 2xx."""
        return self.status // 100 == 2

    @property
    def is_denied(self) -> bool:
        """True if the API key is missing or insufficient: 401 or 403."""
        return self.status in (401, 403)

    @property
    def text(self) -> str:
        """Body as UTF-8, with replacement characters for invalid bytes."""
        return self.body.decode("utf-8", "replace")

    def document(self) -> Mapping[str, Any] | None:
        """Return the JSON object in the body, or None."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def __str__(self) -> str:
        return f"{self.status} {self.reason}"


class FileForm:
    """A form with a file, as pieces of its body.

    Args:
        fields: the other fields, whose values need no escapes.
        on_piece: called with the number of bytes of the file that are sent.
    """

    def __init__(
        self, path: Path, fields: Mapping[str, str], on_piece: Callable[[int], object] = lambda _: None
    ) -> None:
        boundary = secrets.token_hex(16)
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        ]
        name = path.name.replace('"', "%22").replace("\n", "%0A").replace("\r", "%0D")
        parts.append(
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        )
        self._head, self._tail = "".join(parts).encode(), f"\r\n--{boundary}--\r\n".encode()
        self._path, self._on_piece = path, on_piece
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self.bytes = len(self._head) + path.stat().st_size + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        with self._path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
                self._on_piece(len(piece))
        yield self._tail


def request(
    url: str,
    api_key: str | None = None,
    *,
    method: str = "GET",
    content: Mapping[str, Any] | FileForm | None = None,
    timeout_s: float = _TIMEOUT_S,
    tls: ssl.SSLContext | None = None,
) -> HttpResponse:
    """Send a request and read the complete response.

    Args:
        api_key: sent as a bearer token.
        content: sent as JSON, or as a form.
        timeout_s: for connecting, and for each read.
        tls: TLS context for HTTPS; None to trust this machine's certificates.

    Raises:
        ConnectionFailedError: the server cannot be reached, does not speak HTTP, or the URL is not HTTP.
    """
    headers: dict[str, str] = {}
    data: bytes | FileForm | None = None
    if isinstance(content, FileForm):
        data = content
        headers = {"content-type": content.content_type, "content-length": str(content.bytes)}
    elif content is not None:
        data = json.dumps(content).encode()
        headers = {"content-type": "application/json"}
    with _responding(url, api_key, method, data, headers, timeout_s, tls) as response:
        return _response(response)


def download(url: str, api_key: str | None, out: IO[bytes], timeout_s: float = _TIMEOUT_S) -> HttpResponse:
    """Write the body of a successful response to `out`; return any other response, and raise as `request`."""
    with _responding(url, api_key, "GET", None, {}, timeout_s, None) as response:
        if response.status == HTTPStatus.OK:
            shutil.copyfileobj(response, out, _PIECE_BYTES)
        return _response(response)


@contextmanager
def _responding(  # noqa: PLR0913, PLR0917 - one call of urllib
    url: str,
    api_key: str | None,
    method: str,
    data: bytes | FileForm | None,
    headers: Mapping[str, str],
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> Iterator[Any]:
    if not url.startswith(("http://", "https://")):
        raise ConnectionFailedError(f"the URL must begin with http:// or https://, got {url!r}")
    authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        outgoing = urllib.request.Request(  # noqa: S310 - checked above
            url, data, {**authorization, **headers}, method=method
        )
        try:
            response = urllib.request.urlopen(outgoing, timeout=timeout_s, context=tls)  # noqa: S310
        except urllib.error.HTTPError as error:
            response = error
        with response:
            yield response
    except urllib.error.URLError as error:
        raise ConnectionFailedError(str(error.reason)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionFailedError(str(error) or type(error).__name__) from error


def _response(response: Any) -> HttpResponse:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(response.status, response.reason, headers, response.read())
