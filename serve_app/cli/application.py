"""Client of the running application that the options `--url` and `--api-key` select.

- `ApplicationClient`: the calls of commands to one application.
- `request`: an HTTP client on top of the standard library, without an event loop. Commands must start
  quickly, and an asynchronous client takes a third of a second to import. Gateways and endpoint watchers use
  `serve_app.serving.gateway.upstream`.
"""

import argparse
import http.client
import json
import os
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from serve_app.cli.serve.instance import instance_at, running_instances
from serve_app.errors import ServeAppError
from serve_app.serving.access import ADMIN_KEY_VARIABLE, read_admin_key

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
    with _connecting(), _open(url, api_key, method, data, headers, timeout_s, tls) as response:
        return _response(response)


def download(url: str, api_key: str | None, out: IO[bytes], timeout_s: float = _TIMEOUT_S) -> HttpResponse:
    """Write the body of a successful response to `out`; return any other response, and raise as `request`."""
    with _connecting():
        response = _open(url, api_key, "GET", None, {}, timeout_s, None)
    with response:
        # Errors of `out` are not those of the connection.
        while response.status == HTTPStatus.OK and (piece := _read(response)):
            out.write(piece)
        with _connecting():
            return _response(response)


def _read(response: Any) -> bytes:
    with _connecting():
        piece: bytes = response.read(_PIECE_BYTES)
    return piece


def _open(  # noqa: PLR0913, PLR0917 - one call of urllib
    url: str,
    api_key: str | None,
    method: str,
    data: bytes | FileForm | None,
    headers: Mapping[str, str],
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> Any:
    """Send a request and return the response, of any status, before its body."""
    if not url.startswith(("http://", "https://")):
        raise ConnectionFailedError(f"the URL must begin with http:// or https://, got {url!r}")
    authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
    outgoing = urllib.request.Request(  # noqa: S310 - checked above
        url, data, {**authorization, **headers}, method=method
    )
    try:
        return urllib.request.urlopen(outgoing, timeout=timeout_s, context=tls)  # noqa: S310
    except urllib.error.HTTPError as error:
        return error


@contextmanager
def _connecting() -> Iterator[None]:
    """Raise `ConnectionFailedError` for errors of a connection."""
    try:
        yield
    except urllib.error.URLError as error:
        raise ConnectionFailedError(str(error.reason)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionFailedError(str(error) or type(error).__name__) from error


def _response(response: Any) -> HttpResponse:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(response.status, response.reason, headers, response.read())


Document = Mapping[str, Any]

_LOCAL_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "EWSJF_API_KEY"


KEY_ADVICE = (
    f"--api-key or {_KEY_VARIABLE}. `ewsjf serve` creates one. An application that Ray Serve starts has one "
    f"if {ADMIN_KEY_VARIABLE} is set for Ray, or a key in gateway.keys has admin: true"
)
"""Where an admin key comes from, as the end of a sentence."""


class ApplicationError(ServeAppError):
    """The application rejects a request, or its answer is invalid."""


class UnreachableError(ApplicationError):
    """The application does not answer at the address."""


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the options that `ApplicationClient` reads."""
    parser.add_argument(
        "--url",
        help="URL of the application (default: the one that "
        f"`serve` runs on this machine, else {_LOCAL_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(_KEY_VARIABLE),
        help="API key; all commands but `batch` need one of an admin "
        f"(default: {_KEY_VARIABLE}, else the admin key that `serve` created on this machine)",
    )


class ApplicationClient:
    """Client of one application.

    Attributes:
        url: address without `/v1`.
        api_key: the given key, or the one that `serve` created if the application runs on this machine.

    Raises:
        ApplicationError: several applications run here, and no address is given.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        running = list(running_instances())
        if not args.url and len(running) > 1:
            known = ", ".join(f"{each.url} ({each.config})" for each in running)
            raise ApplicationError(f"several applications run here, choose one with --url: {known}")
        self._is_given = bool(args.url)
        chosen = args.url or (running[0].url if running else _LOCAL_URL)
        self.url = chosen.rstrip("/").removesuffix("/v1")
        own = instance_at(self.url, running)
        self.api_key = args.api_key or (None if own is None else read_admin_key(Path(own.folder)))

    def response(self, path: str, **options: Any) -> HttpResponse:
        """Return a successful response; `options` are those of `request`.

        Raises:
            UnreachableError: the application does not answer.
            ApplicationError: it rejects the request.
        """
        with self._responding():
            answer = request(self.url + path, self.api_key, **options)
        return self._checked(path, answer)

    @contextmanager
    def _responding(self) -> Iterator[None]:
        try:
            yield
        except ConnectionFailedError as error:
            hint = "; this is the default address: start the application there, or pass --url"
            raise UnreachableError(
                f"{self.url} does not respond: {error}{'' if self._is_given else hint}"
            ) from error

    def document(self, path: str, *fields: str, **options: Any) -> Document:
        """Return the JSON object of a successful response; raise as `response`, or if it lacks a field."""
        found = self.response(path, **options).document()
        if found is None:
            raise ApplicationError(f"{self.url}{path} did not return JSON: is it a gateway of this project?")
        if missing := [name for name in fields if name not in found]:
            raise ApplicationError(
                f"{self.url}{path} is not a gateway of this project: its response has no {missing[0]}"
            )
        return found

    def models(self, path: str, **options: Any) -> Sequence[Document]:
        """Return the models of a document, otherwise as `document`."""
        found = self.document(path, "models", **options)["models"]
        if not isinstance(found, list) or not all("model" in each for each in found):
            raise ApplicationError(
                f"{self.url}{path} is not a gateway of this project: its response has no list of models"
            )
        return found

    def save(self, path: str, out: IO[bytes], timeout_s: float) -> None:
        """Write the body of a successful response to a file; raise as `response`, or an error of the file."""
        with self._responding():
            answer = download(self.url + path, self.api_key, out, timeout_s)
        self._checked(path, answer)

    def _checked(self, path: str, answer: HttpResponse) -> HttpResponse:
        """Return a successful response; raise `ApplicationError` with the message of any other."""
        if answer.is_success:
            return answer
        if answer.is_denied:
            raise ApplicationError(f"{self.url}{path} returned {answer}: pass an admin key with {KEY_ADVICE}")
        error = (answer.document() or {}).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise ApplicationError(str(message or f"{self.url}{path} returned {answer}"))
