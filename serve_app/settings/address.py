"""The address on which an application listens, from the content of its configuration."""

from collections.abc import Mapping
from typing import Any

DEFAULT_PORT = 8000
DEFAULT_HOST = "0.0.0.0"  # noqa: S104 - Ray Serve's default, which is only checked here

_BLOCK = "http_options"


def http_address(content: Mapping[str, Any]) -> tuple[str, int]:
    """Return the host and port on which the application listens."""
    options = content.get(_BLOCK) or {}
    return str(options.get("host", DEFAULT_HOST)), int(options.get("port", DEFAULT_PORT))


def with_port(content: Mapping[str, Any], port: int | None) -> Mapping[str, Any]:
    """Return the content with another port; unchanged for None."""
    if port is None:
        return content
    options = content.get(_BLOCK)
    return {**content, _BLOCK: {**(options if isinstance(options, Mapping) else {}), "port": port}}
