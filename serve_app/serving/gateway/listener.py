"""The gateway's port: the address of the application, where otherwise a proxy of Ray Serve would listen.

It serves the gateway below the application's route prefix, and the endpoints of such a proxy, `/-/healthz`
and `/-/routes`. A gateway that drains or stops first fails `/-/healthz` while it serves on, so that load
balancers choose another node; then it stops as `serving.http_server` describes.
"""

import asyncio
import json
import ssl

from serve_app.errors import Outcome, SettingsError
from serve_app.serving._ray import HttpOptions, ServedAddress
from serve_app.serving.access import max_connections, raise_descriptor_limit
from serve_app.serving.gateway.answer.responses import JSON_TYPE, RequestRejected
from serve_app.serving.http_server import Application, Exchange, HttpServer, HttpServerOptions
from serve_app.serving.listening import HeldSocket

# Listen backlog; the kernel's default limit.
_BACKLOG = 4096
_OWN_PAGES = "/-/"
_RETRY_AFTER_S = 1.0


class GatewayListener:
    """HTTP server of a gateway on the application's address.

    Args:
        address: from the configuration of Ray Serve.
        stalled_s: timeout of clients that do not read; see `HttpServerOptions`.

    Raises:
        SettingsError: a proxy of Ray Serve has the address, an option is not supported, or a certificate
            cannot be loaded.
    """

    def __init__(self, gateway: Application, address: ServedAddress, stalled_s: float | None = None) -> None:
        options = address.options
        if address.has_proxy:
            raise SettingsError(
                "proxy_location must be Disabled: gateways listen on http_options.port themselves"
            )
        if options.request_timeout_s:
            raise SettingsError(
                f"http_options.request_timeout_s {options.request_timeout_s} is not supported: use "
                "queue_timeout_s instead"
            )
        self._options = options
        # `serve` has done this already, but `ray start` and KubeRay have not.
        raise_descriptor_limit()
        self._socket = HeldSocket(options.host or "127.0.0.1", options.port, _BACKLOG, address.cluster)
        self._closes = False
        self._mounted = MountedGateway(gateway, address.route, address.application)
        self._server = HttpServer(
            "the gateway",
            self._mounted,
            HttpServerOptions(
                idle_s=options.keep_alive_timeout_s,
                stalled_s=stalled_s,
                max_connections=max_connections(),
                overload=_refuse_connection,
                tls=_tls_of(options),
                shares_socket=True,
                backlog=_BACKLOG,
            ),
        )

    def __repr__(self) -> str:
        return f"GatewayListener({self._options.host}:{self._options.port}, {self._server!r})"

    async def start(self) -> None:
        """Bind the address and accept connections.

        Raises:
            PortError: the address is not available.
        """
        await self._server.start(await self._socket.open())

    def check_health(self) -> None:
        """Raise `ServerNotRunningError` if no connections are accepted."""
        self._server.check_health()

    def deregister(self, *, closes: bool = False) -> None:
        """Fail `/-/healthz` from now on, and serve all else. `closes`: no gateway follows on this address."""
        self._mounted.leaving = True
        self._closes = self._closes or closes

    async def stop(self, grace_s: float, deregister_s: float = 0.0) -> None:
        """Shut down gracefully.

        Args:
            grace_s: time for in-flight responses; longer ones are aborted.
            deregister_s: time before that in which `/-/healthz` fails while requests are served.
        """
        self.deregister()
        await asyncio.sleep(deregister_s)
        self._socket.leave(closes=self._closes)
        await self._server.stop(grace_s)


class MountedGateway:
    """Application that mounts the gateway below a prefix; while `leaving`, `/-/healthz` fails."""

    def __init__(self, gateway: Application, route: str, application: str) -> None:
        self.leaving = False
        self._gateway = gateway
        self._prefix = route.rstrip("/")
        self._routes = json.dumps({route: application}).encode()

    def __call__(self, exchange: Exchange) -> None:
        """Serve one request."""
        path, prefix = exchange.path, self._prefix
        if path.startswith(_OWN_PAGES) or not (not prefix or path == prefix or path.startswith(prefix + "/")):
            self._own_page(exchange)
            return
        if prefix:
            exchange.path = path.removeprefix(prefix)
        self._gateway(exchange)

    def _own_page(self, exchange: Exchange) -> None:
        status, kind, path = 200, b"text/plain", exchange.path
        if path == _OWN_PAGES + "healthz":
            status, body = (503, b"draining") if self.leaving else (200, b"success")
        elif path == _OWN_PAGES + "routes":
            kind, body = b"application/json", self._routes
        else:
            status, body = 404, f"Path {path!r} not found. See /-/routes for the paths that are.".encode()
        exchange.respond(status, [(b"content-type", kind)], body)


def _refuse_connection(exchange: Exchange) -> None:
    rejected = RequestRejected(
        Outcome.REJECTED_QUEUE_FULL,
        "This gateway has as many connections as it may have: try again, or use fewer connections.",
        code="too_many_connections",
        status=503,
        retry_after_s=_RETRY_AFTER_S,
    )
    headers = [JSON_TYPE, (b"connection", b"close"), *rejected.headers()]
    exchange.respond(rejected.status, headers, rejected.body())


def _tls_of(options: HttpOptions) -> ssl.SSLContext | None:
    if not options.ssl_certfile:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.ssl_ca_certs)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
    except OSError as exc:
        raise SettingsError(
            f"http_options.ssl_certfile {options.ssl_certfile} cannot be loaded: {exc}"
        ) from exc
    return context
