"""The URL of one endpoint."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, order=True)
class EndpointUrl:
    """Address of an endpoint.

    Attributes:
        host: name or address.
        path: prefix of `/v1`, without a trailing slash.
        server_name: name that was resolved to `host`; verified in the certificate of an HTTPS server.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str = ""
    server_name: str = ""

    @classmethod
    def parse(cls, text: str) -> "EndpointUrl":
        """Parse a URL such as `http://10.0.0.7:8000`, with or without `/v1` at the end.

        Raises:
            ValueError: it is not such a URL; the message quotes it.
        """
        rejection = f"an endpoint's URL looks like http://host:8000, got {text!r}"
        try:
            parts = urlsplit(text.strip())
            port = parts.port
        except ValueError as exc:
            raise ValueError(rejection) from exc
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(rejection)
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                f"{parts.scheme}://{parts.hostname}: give credentials as api_key, not in the URL"
            )
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(scheme, parts.hostname, port or _PORTS[scheme], path)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port in the form of a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
