"""HTTP servers on the test's event loop."""

import contextlib
from collections.abc import AsyncIterator

from serve_app.engines.engine import ASGIApp
from serve_app.serving.gateway import Gateway
from serve_app.serving.http_server import HttpServer, HttpServerOptions, asgi_application
from serve_app.serving.listening import listening_socket


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp | Gateway, port: int = 0, stalled_s: float | None = None
) -> AsyncIterator[int]:
    """Serve an ASGI app or a gateway; yield the port. Responses that are open at the end are cut."""
    application = app if isinstance(app, Gateway) else asgi_application(app)
    server = HttpServer("a test", application, HttpServerOptions(idle_s=5.0, stalled_s=stalled_s))
    sock = listening_socket("127.0.0.1", port, 1, 256)
    port = sock.getsockname()[1]
    await server.start(sock)
    try:
        yield port
    finally:
        await server.stop(0.0)
