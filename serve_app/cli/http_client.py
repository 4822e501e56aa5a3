"""HTTP client of the commands: one function on top of the standard library, without an event loop.

Commands must start quickly, and an asynchronous client takes a third of a second to import. Gateways and
endpoint watchers use `serve_app.serving.gateway.upstream`, and `bench` has a client that reads the clock at
every arrival of bytes.
"""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any

from serve_app.errors import ServeAppError

_TIMEOUT_S = 10.0


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


def request(
    url: str,
    api_key: str | None = None,
    *,
    method: str = "GET",
    content: Mapping[str, Any] | None = None,
    timeout_s: float = _TIMEOUT_S,
    tls: ssl.SSLContext | None = None,
) -> HttpResponse:
    """Send a request and read the complete response.

    Args:
        api_key: sent as a bearer token.
        content: sent as JSON.
        timeout_s: for connecting, and for each read.
        tls: TLS context for HTTPS; None to trust this machine's certificates.

    Raises:
        ConnectionFailedError: the server cannot be reached, does not speak HTTP, or the URL is not HTTP.
    """
    if not url.startswith(("http://", "https://")):
        raise ConnectionFailedError(f"the URL must begin with http:// or https://, got {url!r}")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    data = None if content is None else json.dumps(content).encode()
    if data is not None:
        headers["content-type"] = "application/json"
    try:
        outgoing = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - checked above
        with urllib.request.urlopen(outgoing, timeout=timeout_s, context=tls) as response:  # noqa: S310
            return _response(response.status, response.reason, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return _response(error.code, error.reason, error.headers, error.read())
    except urllib.error.URLError as error:
        raise ConnectionFailedError(str(error.reason)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionFailedError(str(error) or type(error).__name__) from error


def _response(status: int, reason: str, headers: Message, body: bytes) -> HttpResponse:
    return HttpResponse(status, reason, {name.lower(): value for name, value in headers.items()}, body)
