"""Which requests may pass Ray Serve by on their way to the gateway, and under which prefix.

Behind HAProxy a replica of Serve serves HTTP itself, and puts around each request three tasks, a queue,
metrics of Ray, and a line in a log. The gateway has its own of all that. Serve's part also keeps what an
operator may have asked for: a time limit on every request, and middlewares. With one of these, everything
goes its way.
"""

from typing import Any, Protocol

from ray.serve._private.http_util import RequestIdMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

# Serve answers these itself: they tell HAProxy whether this replica lives.
OF_SERVE = "/-/"


class Ingress(Protocol):
    """What a server tells of the paths that are asked for."""

    def prefix_of(self, path: str) -> str | None:
        """The prefix that the gateway is mounted at; None when this path is not for it."""
        ...


class ServeIngress:
    """A replica of Serve as its own server sees it.

    Args:
        replica: of Ray Serve 2.60 and its like; its prefix may change while it runs.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    def prefix_of(self, path: str) -> str | None:
        """The prefix that the gateway is mounted at; None when this path is for Serve."""
        prefix: str = (self._replica._route_prefix or "").rstrip("/")  # noqa: SLF001 - Serve tells it nowhere
        return prefix_among(prefix, path)


def prefix_among(prefix: str, path: str) -> str | None:
    """The prefix that a gateway is mounted at; None for a path that is not below it, or that Serve answers.

    Args:
        prefix: without a slash at the end; empty for all paths.
    """
    if path.startswith(OF_SERVE):
        return None
    return prefix if not prefix or path == prefix or path.startswith(prefix + "/") else None


def ingress_of(app: Any) -> ServeIngress | None:
    """The replica whose server serves `app`; None for another server, or when requests must go through Serve.

    Args:
        app: as uvicorn calls it, with what Serve and uvicorn have put around.
    """
    if isinstance(app, ProxyHeadersMiddleware):
        app = app.app
    # The innermost of Serve's middlewares; those of operators would be around it.
    if not isinstance(app, RequestIdMiddleware):
        return None
    replica = getattr(app._app, "__self__", None)  # noqa: SLF001 - see above
    options = getattr(replica, "_http_options", None)
    if options is None or not hasattr(replica, "_route_prefix") or options.request_timeout_s:
        return None
    return ServeIngress(replica)
