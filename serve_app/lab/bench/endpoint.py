"""The endpoint under test."""

from urllib.parse import urlsplit

from serve_app.errors import ServeAppError


class BenchError(ServeAppError):
    """A benchmark cannot run; the message has the reason and the remedy."""


def base_url(url: str) -> str:
    """Return `http://host:port[/prefix]` from a URL with or without a trailing `/v1`.

    Raises:
        BenchError: the URL has another form.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise BenchError(f"cannot read URL {url!r}: {error}") from error
    if not is_valid:
        raise BenchError(f"the URL must have the form http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")
