"""Adapter between the HTTP server and ASGI applications."""

from serve_app.engines.engine import ASGIApp, Scope
from serve_app.serving.http_server import Application, Exchange

_ASGI = {"version": "3.0", "spec_version": "2.3"}


def asgi_application(app: ASGIApp) -> Application:
    """Return the application that serves each request with an ASGI application, in a task."""

    def serve(exchange: Exchange) -> None:
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "server": exchange.server,
            "client": exchange.client,
            "scheme": exchange.scheme,
            "root_path": "",
            "http_version": exchange.version,
            "method": exchange.method,
            "path": exchange.path,
            "raw_path": exchange.raw_path,
            "query_string": exchange.query,
            "headers": exchange.headers,
        }
        exchange.run(_call(app, scope, exchange))

    return serve


async def _call(app: ASGIApp, scope: Scope, exchange: Exchange) -> None:
    await app(scope, exchange.receive, exchange.send)
